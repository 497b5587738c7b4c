import json
import math

import pytest

from trainer.metrics import MetricsLog, read_metrics


def write_all(path, records, last_step=0):
    log = MetricsLog(path, last_step=last_step)
    for record in records:
        log.write(record)
    log.sync()
    log.close()


def test_records_come_back_in_order(tmp_path):
    records = [{"step": 1, "loss": 2.5}, {"step": 1, "eval_loss": 2.25}, {"step": 2, "loss": 2.0}]
    write_all(tmp_path / "metrics.jsonl", records)
    assert read_metrics(tmp_path / "metrics.jsonl") == records


def test_a_resume_reads_like_a_run_that_never_stopped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_all(path, [{"step": s, "loss": 10.0 - s} for s in (1, 2, 3, 4)])
    write_all(path, [{"step": s, "loss": 10.0 - s} for s in (3, 4, 5)], last_step=2)
    assert read_metrics(path) == [{"step": s, "loss": 10.0 - s} for s in (1, 2, 3, 4, 5)]


def test_an_evaluation_of_the_kept_step_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_all(path, [{"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 1.5}, {"step": 3}])
    write_all(path, [], last_step=2)
    assert [set(r) for r in read_metrics(path)] == [{"step", "loss"}, {"step", "eval_loss"}]


def test_a_line_cut_by_a_crash_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 3.0}]
    write_all(path, [{"step": 2, "loss": 2.0}], last_step=5)
    assert path.read_text() == '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n'


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[1]\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 "):
        read_metrics(path)


def test_numbers_that_json_lacks_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_all(path, [{"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 1e-3}])
    line = path.read_text()
    assert json.loads(line) == {"step": 1, "loss": None, "grad_norm": None, "lr": 1e-3}
    assert "NaN" not in line


def test_a_record_is_readable_before_the_log_is_closed(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", last_step=0)
    log.write({"step": 1})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]
    log.close()
