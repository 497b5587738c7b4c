import dataclasses
import errno
import json
import math
import os
import shutil
import signal

import pytest
import torch

from trainer import faults, loop, start
from trainer.checkpoint.store import Checkpoints
from trainer.config import DataConfig
from trainer.exit_codes import ExitCode
from trainer.learner import build_learner
from trainer.metrics import MetricsLog, read_metrics
from trainer.outcome import Outcome
from trainer.ranks import Ranks
from trainer.state import TrainState

MEASURED = {"tokens_per_s", "rss_mb", "step_s", "data_wait_s", "engram_wait_s"}


def train(config, run_dir, *, attempt=1, resume=False, say=None):
    run_dir.mkdir(exist_ok=True)
    return loop.train(
        config,
        run_dir=run_dir,
        attempt=attempt,
        ranks=Ranks(),
        resume=resume,
        say=say or (lambda text: None),
    )


def signal_after(step, number=signal.SIGTERM):
    """A `say` that sends this process a signal when the line of `step` is shown."""

    def say(text):
        if text.split()[:2] == ["step", f"{step}/16"]:
            os.kill(os.getpid(), number)

    return say


def records(run_dir):
    """All metrics, without what a clock or the system measures."""
    found = read_metrics(run_dir / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in found]


def restored(config, run_dir, step):
    """(tensors, trainer state) of a checkpoint."""
    tensors = build_learner(config).tensors()
    checkpoints = Checkpoints(
        run_dir / "checkpoints", keep=9, attempt=99, ranks=Ranks(), say=lambda text: None
    )
    return tensors, checkpoints.load(checkpoints.path(step), tensors)


def saved_steps(run_dir):
    return sorted(int(p.name[5:]) for p in (run_dir / "checkpoints").glob("step_????????"))


@pytest.fixture(scope="module")
def through(config, tmp_path_factory):
    """A run of 16 steps that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("through")
    outcome = train(config, run_dir)
    assert outcome == Outcome(ExitCode.DONE, "done", 16, "All 16 steps are done.")
    return run_dir


def assert_same_end(config, run_dir, through):
    assert records(run_dir) == records(through)
    (here, state), (there, expected) = restored(config, run_dir, 16), restored(config, through, 16)
    assert state == expected
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        assert torch.equal(here[name], tensor), name


def test_a_run_learns_and_records_every_step(config, through):
    steps = [r for r in records(through) if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 17))
    assert steps[0]["loss"] == pytest.approx(math.log(config.model.vocab_size), rel=0.05)
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert [r["lr"] for r in steps[:5]] == pytest.approx([0.75e-3, 1.5e-3, 2.25e-3, 3e-3, 3e-3])
    assert steps[-1]["tokens_total"] == sum(r["tokens"] for r in steps)
    evaluations = [r for r in records(through) if "eval_loss" in r]
    assert [r["step"] for r in evaluations] == [6, 12, 16]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert saved_steps(through) == [8, 16]


def test_the_state_tells_where_the_samples_stand(config, through):
    tensors, state = restored(config, through, 8)
    assert (state.step, state.cursor, state.seed) == (8, 8 * 4, 3)
    assert state.tokens_total == sum(r["tokens"] for r in records(through)[:9] if "tokens" in r)
    moments = [t for name, t in tensors.items() if name.startswith("optimizer/layers")]
    assert moments
    assert all(bool(t.count_nonzero()) for t in moments if t.dim() == 0)
    assert tensors["optimizer/embed.weight/step"].item() == 8
    assert tensors["optimizer/embed.weight/exp_avg_sq"].count_nonzero() > 0
    assert tensors["table_optimizer/layers.1.engram.embed/steps"].max().item() == 8


def test_eight_steps_a_resume_and_eight_steps_are_sixteen_steps(config, through, tmp_path):
    stopped = train(config, tmp_path, say=signal_after(8))
    assert (stopped.code, stopped.step) == (ExitCode.AGAIN, 8)
    done = train(config, tmp_path, attempt=2, resume=True)
    assert (done.code, done.step) == (ExitCode.DONE, 16)
    assert_same_end(config, tmp_path, through)


@pytest.mark.long
def test_bfloat16_trains_and_resumes_to_the_same_bits(config, through, tmp_path):
    narrow = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    (tmp_path / "whole").mkdir()
    assert train(narrow, tmp_path / "whole").code == ExitCode.DONE
    run_dir = tmp_path / "parts"
    outcome = train(narrow, run_dir, say=signal_after(8))
    assert (outcome.code, outcome.step) == (ExitCode.AGAIN, 8)
    assert train(narrow, run_dir, attempt=2, resume=True).code == ExitCode.DONE
    assert_same_end(narrow, run_dir, tmp_path / "whole")
    tensors, _ = restored(narrow, run_dir, 16)
    assert {t.dtype for n, t in tensors.items() if n.startswith(("model/", "tables/"))} == {
        torch.float32
    }
    losses, wide = ([r["loss"] for r in records(d) if "loss" in r] for d in (run_dir, through))
    assert losses != wide
    # Later steps depend on the order of documents: one that routes otherwise changes all after it.
    assert losses[:8] == pytest.approx(wide[:8], rel=0.02)
    assert losses[-1] < losses[0] - 0.5


def test_three_resumes_in_a_row_see_the_same_samples(config, through, tmp_path):
    for attempt, step in enumerate((3, 5, 11), start=1):
        stopped = train(
            config, tmp_path, attempt=attempt, resume=attempt > 1, say=signal_after(step)
        )
        assert (stopped.code, stopped.step) == (ExitCode.AGAIN, step)
        assert step in saved_steps(tmp_path)
    assert train(config, tmp_path, attempt=4, resume=True).code == ExitCode.DONE
    assert_same_end(config, tmp_path, through)


def test_a_crash_after_a_checkpoint_repeats_only_the_lost_steps(
    config, through, tmp_path, monkeypatch
):
    class CrashError(Exception):
        pass

    def crash(text):
        if text.startswith("step 11/16"):
            raise CrashError

    with pytest.raises(CrashError):
        train(config, tmp_path, say=crash)
    assert [r["step"] for r in records(tmp_path)][-1] == 11
    said = []
    assert train(config, tmp_path, attempt=2, resume=True, say=said.append).code == ExitCode.DONE
    assert said[0].startswith("resuming after step 8 from ")
    assert next(line for line in said if line.startswith("step ")).startswith("step  9/16")
    assert_same_end(config, tmp_path, through)


def of_steps(config, steps, **parts):
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, steps=steps), **parts
    )


def test_a_resume_from_nothing_starts_at_the_beginning(config, through, tmp_path):
    outcome = train(of_steps(config, 2), tmp_path, resume=True)
    assert (outcome.code, outcome.step) == (ExitCode.DONE, 2)
    assert records(tmp_path)[:2] == records(through)[:2]


def test_loader_processes_change_nothing(config, through, tmp_path):
    parallel = of_steps(config, 3, data=dataclasses.replace(config.data, workers=1))
    assert train(parallel, tmp_path).code == ExitCode.DONE
    assert records(tmp_path)[:3] == records(through)[:3]


def test_a_finished_run_has_nothing_left_to_do(config, through):
    before = records(through)
    outcome = train(config, through, attempt=2, resume=True)
    assert (outcome.code, outcome.step) == (ExitCode.DONE, 16)
    assert records(through) == before


def test_more_steps_continue_a_finished_run(config, through, tmp_path):
    assert train(of_steps(config, 2), tmp_path).step == 2
    assert train(of_steps(config, 4), tmp_path, attempt=2, resume=True).step == 4
    steps = [[r for r in records(run)[:5] if "loss" in r] for run in (tmp_path, through)]
    assert steps[0] == steps[1][:4]


def test_ctrl_c_saves_and_ends_with_130(config, tmp_path):
    outcome = train(config, tmp_path, say=signal_after(2, signal.SIGINT))
    assert (outcome.code, outcome.step) == (ExitCode.INTERRUPTED, 2)
    assert saved_steps(tmp_path) == [2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_after_the_last_step_changes_nothing(config, tmp_path, monkeypatch, number):
    def leave(*_):
        raise AssertionError("how the run ended was known")

    def close(log, closing=MetricsLog.close):
        os.kill(os.getpid(), number)
        closing(log)

    monkeypatch.setattr(MetricsLog, "close", close)
    short = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=1))
    before = signal.signal(number, leave)
    try:
        assert train(short, tmp_path / "run").code == ExitCode.DONE
        assert signal.getsignal(number) is leave
    finally:
        signal.signal(number, before)


def test_ctrl_c_while_the_data_are_read(config, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "load_corpus", interrupt)
    outcome = train(config, tmp_path)
    assert (outcome.code, outcome.step) == (ExitCode.INTERRUPTED, 0)


def test_saves_in_the_background_change_nothing(config, through, tmp_path):
    checkpoint = dataclasses.replace(config.checkpoint, every=3, async_=True, staging_mb=1)
    said = []
    outcome = train(dataclasses.replace(config, checkpoint=checkpoint), tmp_path, say=said.append)
    assert outcome.code == ExitCode.DONE
    saved = [int(line.split()[1].rstrip(":")) for line in said if ": saved " in line]
    assert saved == [3, 6, 9, 12, 15, 16]
    assert saved_steps(tmp_path) == [15, 16]
    assert_same_end(config, tmp_path, through)


@pytest.mark.parametrize("background", [False, True], ids=["waited for", "in the background"])
def test_a_diverged_run_keeps_the_good_checkpoint(config, tmp_path, background):
    wild = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, lr=1e30, warmup_steps=0),
        checkpoint=dataclasses.replace(config.checkpoint, every=1, keep=1, async_=background),
    )
    outcome = train(wild, tmp_path)
    assert outcome.code == ExitCode.DIVERGED
    assert outcome.step >= 1
    assert f"Step {outcome.step + 1} diverged" in outcome.message
    assert saved_steps(tmp_path) == [outcome.step]
    tensors, _ = restored(wild, tmp_path, outcome.step)
    assert all(bool(torch.isfinite(t.float()).all()) for t in tensors.values())


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_in_the_background_ends_the_run_at_a_later_step(config, tmp_path):
    checkpoint = dataclasses.replace(config.checkpoint, every=2, async_=True)
    faults.arm("disk-full@save.slice,step=4")
    try:
        outcome = train(dataclasses.replace(config, checkpoint=checkpoint), tmp_path)
    finally:
        faults.arm("")
    assert (outcome.code, outcome.reason) == (ExitCode.IO_ERROR, "disk full")
    assert outcome.step in (5, 6)  # at the next border, or where the next save is due
    assert "saving step 4: the disk at /" in outcome.message
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def test_a_disk_that_fills_up_ends_the_run_with_the_old_checkpoint(config, tmp_path, monkeypatch):
    write = TrainState.write
    monkeypatch.setattr(
        TrainState, "write", lambda self, f: write(self, f) if self.step < 3 else no_space()
    )
    often = dataclasses.replace(config.checkpoint, every=2)
    outcome = train(dataclasses.replace(config, checkpoint=often), tmp_path)
    assert (outcome.code, outcome.reason, outcome.step) == (ExitCode.IO_ERROR, "disk full", 4)
    assert "saving step 4: the disk at /" in outcome.message
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def test_metrics_that_cannot_be_written_end_the_run(config, tmp_path, monkeypatch):
    class Full:
        write = flush = fileno = close = no_space

    class FullLog(MetricsLog):
        def __init__(self, path, *, last_step):
            self.path, self._file = path, Full()

        def close(self):
            pass

    monkeypatch.setattr(start, "MetricsLog", FullLog)
    outcome = train(config, tmp_path)
    assert (outcome.code, outcome.reason, outcome.step) == (ExitCode.IO_ERROR, "disk full", 1)


def test_a_run_folder_in_use_is_not_overwritten(config, through):
    before = records(through)
    outcome = train(config, through, attempt=5)
    assert outcome.code == ExitCode.CONFIG
    assert "step_00000016 exists already" in outcome.message
    assert records(through) == before


def test_changed_documents_are_refused_until_they_are_accepted(config, through, tmp_path):
    (tmp_path / "documents").mkdir()
    for number in range(40):
        (tmp_path / "documents" / f"{number}.txt").write_text(f"other words {number}")
    data: DataConfig = dataclasses.replace(config.data, paths=(str(tmp_path / "documents"),))
    outcome = train(dataclasses.replace(config, data=data), through, attempt=5, resume=True)
    assert outcome.code == ExitCode.BAD_DATA
    assert "The documents are not those" in outcome.message
    shutil.copytree(through, tmp_path / "run")
    longer = dataclasses.replace(
        config,
        data=dataclasses.replace(data, accept_changed=True),
        train=dataclasses.replace(config.train, steps=17),
    )
    said: list[str] = []
    outcome = train(longer, tmp_path / "run", attempt=5, resume=True, say=said.append)
    assert (outcome.code, outcome.step) == (ExitCode.DONE, 17)
    assert any("documents have changed" in text for text in said)


def test_another_step_size_is_refused(config, through):
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, packs_per_step=2))
    outcome = train(half, through, attempt=5, resume=True)
    assert outcome.code == ExitCode.CONFIG
    assert "set train.packs_per_step=4" in outcome.message


def test_evaluation_without_held_out_documents_is_refused(config, tmp_path):
    data = dataclasses.replace(config.data, holdout=0.0)
    outcome = train(dataclasses.replace(config, data=data), tmp_path)
    assert outcome.code == ExitCode.CONFIG
    assert "data.holdout" in outcome.message


def test_bad_data_are_named(config, tmp_path):
    data = dataclasses.replace(config.data, paths=(str(tmp_path / "nowhere.txt"),))
    outcome = train(dataclasses.replace(config, data=data), tmp_path)
    assert outcome.code == ExitCode.BAD_DATA
    assert "nowhere.txt" in outcome.message


def test_checkpoints_that_will_not_fit_are_refused_at_the_start(config, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.checkpoint.space.stored_bytes", lambda shards, slice_bytes: 10**18)
    outcome = train(config, tmp_path)
    assert (outcome.code, outcome.reason, outcome.step) == (ExitCode.IO_ERROR, "disk full", 0)
    assert records(tmp_path) == [] if (tmp_path / "metrics.jsonl").exists() else True


def test_running_out_of_memory_is_a_configuration_failure(config, tmp_path, monkeypatch):
    def exhaust(*args, **kwargs):
        return torch.empty(2**60)

    monkeypatch.setattr(loop, "train_step", exhaust)
    outcome = train(config, tmp_path)
    assert (outcome.code, outcome.reason) == (ExitCode.CONFIG, "out of memory")


def test_a_bug_leaves_as_an_exception(config, tmp_path, monkeypatch):
    def bug(*args, **kwargs):
        raise ValueError("ours")

    monkeypatch.setattr(loop, "train_step", bug)
    with pytest.raises(ValueError, match="ours"):
        train(config, tmp_path)


def test_logging_less_often_keeps_the_last_step(config, tmp_path):
    quiet = of_steps(
        config,
        5,
        logging=dataclasses.replace(config.logging, every=2),
        eval=dataclasses.replace(config.eval, every=0),
        checkpoint=dataclasses.replace(config.checkpoint, every=0),
    )
    assert train(quiet, tmp_path).code == ExitCode.DONE
    assert [r["step"] for r in records(tmp_path)] == [2, 4, 5]
    assert saved_steps(tmp_path) == [5]


def test_samples_are_said_and_change_nothing(config, through, tmp_path):
    said = []
    looked = of_steps(config, 3, logging=dataclasses.replace(config.logging, samples=2))
    assert train(looked, tmp_path, say=said.append).code == ExitCode.DONE
    assert records(tmp_path)[:3] == records(through)[:3]
    samples = [line for line in said if " goes on " in line]
    assert [line.split(":")[0] for line in samples] == ["step 2", "step 2", "step 3", "step 3"]
    words = "engram memory sparse window query expert token stream hash".split()
    assert all(any(word in line.split(" goes on ")[0] for word in words) for line in samples)


def test_an_outcome_survives_json():
    outcome = Outcome(ExitCode.DIVERGED, "diverged", 7, "why")
    text = json.dumps(outcome.to_dict())
    assert json.loads(text)["code"] == 77
    assert Outcome.from_dict(json.loads(text)) == outcome
