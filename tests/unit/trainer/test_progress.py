import io

from rich.console import Console

from trainer.progress import BarProgress, LineProgress, duration

RECORD = {"step": 7, "loss": 9.8765, "tokens_per_s": 1234.5, "lr": 2.6e-4, "step_s": 0.5}


def test_a_pipe_gets_one_plain_line_per_record(capsys):
    lines = []
    progress = LineProgress(steps=400, say=lines.append)
    progress.show(RECORD)
    progress.say("checkpoint saved")
    progress.close()
    assert lines == [
        "step   7/400  loss  9.877    1,234 tokens/s  lr 2.60e-04  3m 16s left",
        "checkpoint saved",
    ]
    assert capsys.readouterr().out == ""


def test_a_step_without_labels_shows_no_number_for_its_loss():
    lines = []
    LineProgress(steps=8, say=lines.append).show({**RECORD, "loss": None})
    assert "loss    n/a" in lines[0]


def test_a_terminal_gets_a_bar_that_keeps_messages():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    progress = BarProgress(steps=10, first_step=5, console=console)
    progress.show(RECORD)
    progress.say("saved [step 7]")
    progress.close()
    text = out.getvalue()
    assert "step 7/10" in text
    assert "loss  9.877" in text
    assert "saved [step 7]" in text


def test_durations():
    assert [duration(s) for s in (0.2, 59.4, 60, 3599, 3600, 90061)] == [
        "0s",
        "59s",
        "1m 00s",
        "59m 59s",
        "1h 00m",
        "25h 01m",
    ]
