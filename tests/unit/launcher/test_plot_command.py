import argparse
import json
import math

import numpy as np
import pytest
from PIL import Image

from launcher.plot import add_arguments, run
from trainer.plot import load_curves


def write_run(folder, *, steps, every=1, start=11.8):
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(every, steps + 1, every):
            loss = None if step == 2 else start * math.exp(-step / 100)
            record = {
                "step": step,
                "loss": loss,
                "lr": min(step, 20) * 5e-5,
                "grad_norm": 1 + math.sin(step) / 2,
                "tokens": 4000,
                "tokens_total": 4000 * step,
                "tokens_per_s": 900 + 50 * math.cos(step),
            }
            file.write(json.dumps(record) + "\n")
            if step % 50 == 0:
                evaluation = {"step": step, "eval_loss": start * math.exp(-step / 110)}
                file.write(json.dumps(evaluation) + "\n")
    return folder


def plot(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(argument) for argument in arguments]))


def colors_of(path):
    """How many pixels of a picture have each strong colour."""
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    found, counts = np.unique(pixels, axis=0, return_counts=True)
    return {tuple(c): int(n) for c, n in zip(found.tolist(), counts, strict=True)}


BLUE, ORANGE = (31, 119, 180), (255, 127, 14)  # the first two colours of the cycle


def test_one_run_is_drawn_into_its_own_folder(tmp_path, capsys):
    folder = write_run(tmp_path / "tiny" / "first", steps=200)
    assert plot(folder) == 0
    picture = folder / "plots" / "metrics.png"
    assert capsys.readouterr().out.strip() == str(picture)
    assert Image.open(picture).size == (1440, 960)
    colors = colors_of(picture)
    assert colors[BLUE] > 1000
    assert ORANGE not in colors


def test_several_runs_are_overlaid_in_their_own_colours(tmp_path):
    runs = [write_run(tmp_path / name, steps=60, start=8 + i) for i, name in enumerate("ab")]
    output = tmp_path / "new" / "both.png"
    assert plot(*runs, "-o", output) == 0
    colors = colors_of(output)
    assert colors[BLUE] > 500
    assert colors[ORANGE] > 500


def test_the_axis_is_tokens_for_evaluations_too(tmp_path):
    curves = load_curves(write_run(tmp_path / "tiny" / "x", steps=100, every=10))
    assert curves.label == "tiny/x"
    assert curves.tokens.tolist() == [4000.0 * step for step in range(10, 101, 10)]
    assert curves.eval_tokens.tolist() == [200_000.0, 400_000.0]
    assert curves.eval_loss[1] == pytest.approx(11.8 * math.exp(-100 / 110))


def test_a_step_without_a_loss_is_a_gap(tmp_path):
    curves = load_curves(write_run(tmp_path / "x", steps=120))
    assert np.flatnonzero(np.isnan(curves.loss)).tolist() == [1]
    assert plot(tmp_path / "x") == 0


def test_the_metrics_file_itself_is_a_run_too(tmp_path):
    folder = write_run(tmp_path / "x", steps=5)
    assert plot(folder / "metrics.jsonl") == 0
    assert (folder / "plots" / "metrics.png").exists()


def test_a_missing_run_is_named(tmp_path, capsys):
    write_run(tmp_path / "runs" / "tiny" / "20250101-120000", steps=5)
    assert plot(tmp_path / "nothing") == 2
    assert f"dsv41 plot: {tmp_path / 'nothing'} is no run's folder" in capsys.readouterr().err


def test_a_name_is_a_run_too(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "runs" / "tiny" / "20250101-120000", steps=5)
    (folder / "attempts").mkdir()
    (folder / "config.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "20250101-120000", "tiny/20250101-120000", folder.parent):
        assert plot(name) == 0
        (folder / "plots" / "metrics.png").unlink()


def test_a_run_without_steps_is_named(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    assert plot(tmp_path) == 2
    assert "holds no step yet" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys):
    folder = write_run(tmp_path / "x", steps=5)
    (tmp_path / "file").write_text("")
    assert plot(folder, "-o", tmp_path / "file" / "p.png") == 73
    assert str(tmp_path / "file" / "p.png") in capsys.readouterr().err
