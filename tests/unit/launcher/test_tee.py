"""A rank's log holds what was printed, as it reads on paper."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from launcher import tee
from launcher.runs.logs import Tail
from launcher.tee import Log, logged


def test_both_streams_go_to_the_terminal_and_the_log(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rank.log"
    with logged(path, speaks=True) as log:
        print("out")
        print("err", file=sys.stderr)
        log.write("only in the log\n")
        assert not sys.stdout.isatty()
    print("after")
    assert path.read_text() == "out\nerr\nonly in the log\n"
    assert capsys.readouterr() == ("out\nafter\n", "err\n")


def test_a_silent_rank_writes_to_its_log_alone(tmp_path: Path, capsys) -> None:
    with logged(tmp_path / "rank.log", speaks=False):
        print("out")
        print("err", file=sys.stderr)
    assert (tmp_path / "rank.log").read_text() == "out\nerr\n"
    assert capsys.readouterr() == ("", "")


def test_streams_come_back_after_an_exception(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    try:
        with logged(tmp_path / "rank.log", speaks=True):
            raise KeyError
    except KeyError:
        pass
    assert (sys.stdout, sys.stderr) == before


def test_a_bar_leaves_its_last_state(tmp_path: Path) -> None:
    log = Log(tmp_path / "rank.log")
    for i in range(3):
        log.write(f"\r\x1b[2Kstep {i}")
    log.write("\n\x1b[1;31mred\x1b[0m\r\nlast")
    log.close()
    assert (tmp_path / "rank.log").read_text() == "step 2\nred\nlast\n"


def test_a_later_attempt_appends(tmp_path: Path) -> None:
    for word in ("one", "two"):
        with logged(tmp_path / "rank.log", speaks=False):
            print(word)
    assert (tmp_path / "rank.log").read_text() == "one\ntwo\n"


def test_a_full_disk_stops_the_log_not_the_program(tmp_path: Path, capsys) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    with logged(tmp_path / "rank.log", speaks=True) as log:
        log._file = Full()
        print("one")
        print("two")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_bar_of_rich_draws_through_it(tmp_path: Path, monkeypatch) -> None:
    from rich.console import Console
    from rich.progress import Progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with logged(tmp_path / "rank.log", speaks=True), Progress(console=Console()) as bar:
        bar.update(bar.add_task("work", total=2), advance=1)
        bar.console.print("between")
    assert "\x1b[" in terminal.getvalue()
    text = (tmp_path / "rank.log").read_text()
    assert "between\n" in text
    assert "\x1b" not in text


def test_a_long_log_goes_on_in_a_new_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tee, "LOG_BYTES", 30)
    monkeypatch.setattr(tee, "OLDER_PARTS", 2)
    path = tmp_path / "rank-00000.log"
    log = Log(path)
    tail = Tail(path)
    lines = [f"line {n:03d}" for n in range(1, 24)]
    seen = []
    for line in lines:
        log.write(line + "\n")
        seen += tail.more()
    log.close()
    assert seen == lines  # whoever follows it loses nothing
    names = [f"{path.name}{part}" for part in (".2", ".1", "")]
    assert {p.name for p in tmp_path.iterdir()} == set(names)
    parts = [(tmp_path / name).read_text() for name in names]
    kept = "".join(parts).splitlines()
    assert kept == lines[-len(kept) :] and len(kept) > 8
    assert all(len(part) < 30 + 9 for part in parts)


def test_a_log_that_is_gone_on_with_knows_its_size(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tee, "LOG_BYTES", 30)
    path = tmp_path / "rank-00000.log"
    for line in ("first half of it", "second half of it", "and more"):
        log = Log(path)
        log.write(line + "\n")
        log.close()
    assert path.read_text() == "and more\n"
