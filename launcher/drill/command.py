"""`dsv41 drill RUN | +experiment=... [overrides]`: does this setup survive what can happen?"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.composed import composed_run
from launcher.drill.cases import CASES, EVERY, STEPS
from launcher.drill.rehearse import expected, log_of, rehearse, train
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder, new_id
from launcher.runs.names import named
from launcher.runs.recorded import Words, with_changes, words_of
from launcher.runs.text import aligned, as_typed
from trainer.exit_codes import ExitCode
from trainer.faults import ACTIONS, POINTS, VARIABLE
from trainer.metrics import read_metrics

FAILED = 1
LEAST_HANG_S = 20.0
KINDS = ("local", "torchrun", "ray")  # whose command lasts as long as the run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "\n".join(
        [
            "Rehearses faults on your own setup: your model, data, mesh and launcher, in runs of",
            f"{STEPS} steps with a checkpoint every {EVERY}. Each is struck by one fault, must go",
            "on from the right checkpoint and end like a run that nothing interrupted, bit for bit",
            "(on devices that add up in any order: nearly). Runs that did are removed again.",
            "",
            "Takes the words that start the run, or a run, whose words are taken.",
            "Exit code: 0 all went as expected, 1 something did not, else that of a run that could",
            "not be begun.",
        ]
    )
    parser.add_argument("words", nargs="*", metavar="RUN | NAME=VALUE", help="as for dsv41-train")
    parser.add_argument(
        "--case",
        action="append",
        choices=[case.name for case in CASES],
        metavar="NAME",
        help="only this one; may be given several times",
    )
    parser.add_argument("--list", action="store_true", help="list the cases, start nothing")
    parser.add_argument("--keep", action="store_true", help="keep all runs of the drill")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own groups")


def run(args: argparse.Namespace) -> int:
    """Rehearse, print the table, and return the exit code."""
    if args.list:
        print("\n".join(listed()))
        return ExitCode.DONE
    try:
        return _drill(args)
    except Stop as stop:
        print(f"dsv41 drill: {stop.message}", file=sys.stderr)
        return stop.code


def listed() -> list[str]:
    """All cases, and what else a fault may be."""
    return [
        *aligned([("case", "what happens"), *((case.name, case.purpose) for case in CASES)]),
        "",
        f"Of your own, in the environment of dsv41-train: {VARIABLE}=ACTION@POINT[,NAME=NUMBER]...",
        "with the conditions step, rank, attempt and visit, for example",
        f"{VARIABLE}='slow@data,rank=1,ms=200;kill@save.rename,step=6,attempt=1'",
        "",
        *aligned([("action", ""), *ACTIONS.items()]),
        "",
        *aligned([("point", ""), *POINTS.items()]),
    ]


def _drill(args: argparse.Namespace) -> int:
    words, config = _short(args)
    cases = [case for case in CASES if not args.case or case.name in args.case]
    home, mark = config.home, new_id()
    through = RunFolder(home / f"{mark}-through")
    given = [*words.flags, *words.overrides]
    print(f"Without a fault first, in {as_typed(through.path)} ...", flush=True)
    code = train(given, through)
    if code != ExitCode.DONE:
        raise Stop(ExitCode(code) if code > 0 else ExitCode.AGAIN, _last_words(through))
    given.append(f"resilience.hang_s={_hang_s(through):.0f}")
    rows, good = [("case", "expected", "seen", "")], True
    for case in cases:
        if case.watched and config.launcher.kind == "local":
            rows.append((case.name, expected(case), "launcher=local: nobody watches", "skipped"))
            continue
        print(f"{case.name}: {case.purpose} ...", flush=True)
        one = RunFolder(home / f"{mark}-{case.name}")
        seen = rehearse(case, given, one, through=through, last=config.parallel.world - 1)
        fine = seen.as_expected(case)
        good &= fine
        rows.append((case.name, expected(case), seen.text, "ok" if fine else "NOT SO"))
        if fine and not args.keep:
            _remove(one)
    if good and not args.keep:
        _remove(through)
    print("", *aligned(rows), sep="\n", flush=True)
    if not good:
        print(f"\nThe runs that went otherwise, and what they said, are in {as_typed(home)}")
    return ExitCode.DONE if good else FAILED


def _short(args: argparse.Namespace) -> tuple[Words, RunConfig]:
    """The words of a short run like the one that is meant, and its configuration."""
    words = _meant(args.words, args.config_dir)
    meant = _composed(words)
    if meant.launcher.kind not in KINDS:
        raise Stop(
            ExitCode.USAGE,
            f"launcher={meant.launcher.kind} returns before its runs end. Take an allocation, and "
            "drill in it with launcher=torchrun.",
        )
    changes = [
        f"name={meant.name}-drill",
        f"train.steps={STEPS}",
        f"checkpoint.every={EVERY}",
        "checkpoint.keep=3",
        "logging.every=1",
        "logging.wandb.mode=disabled",
        "resilience.max_failures=3",
    ]
    words = with_changes(words, changes)
    return words, _composed(words)


def _meant(given: Sequence[str], config_dir: str | None) -> Words:
    if len(given) == 1 and "=" not in given[0]:
        run = named(given[0], Path("runs"))
        own = [word for word in words_of(run).overrides if not word.startswith(("id=", "resume="))]
        return Words(tuple(own), words_of(run).config_dir, words_of(run).config_name)
    if not given:
        raise Stop(ExitCode.USAGE, "give a run's folder, or the words that start a run")
    return Words(tuple(given), config_dir)


def _composed(words: Words) -> RunConfig:
    return composed_run(words.overrides, config_dir=words.config_dir, config_name=words.config_name)


def _hang_s(through: RunFolder) -> float:
    """Long enough that no step of this setup is taken for a hang."""
    steps = [r["step_s"] for r in read_metrics(through.path / "metrics.jsonl") if "step_s" in r]
    return max(LEAST_HANG_S, steps[0], 4 * max(steps[1:]))


def _last_words(run: RunFolder) -> str:
    log = log_of(run)
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    shown = "\n".join(f"  {line}" for line in lines[-12:])
    return f"The run without a fault did not end well:\n{shown}\nAll it said is in {as_typed(log)}"


def _remove(run: RunFolder) -> None:
    shutil.rmtree(run.path, ignore_errors=True)
    log_of(run).unlink(missing_ok=True)
