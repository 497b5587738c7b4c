"""`dsv41 plot RUN...`: the curves of one or several runs in one picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launcher.problems import Stop
from launcher.runs.names import HELP, add_runs_dir, named
from trainer.exit_codes import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=f"{HELP}; or a file metrics.jsonl")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.png",
        help="where the picture goes (default: plots/metrics.png in the first run's folder)",
    )
    add_runs_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Draw args.runs into one PNG, print its path and return the exit code."""
    from trainer.plot import draw, load_curves, metrics_file

    try:
        paths = [_meant(text, args.runs_dir) for text in args.runs]
        curves = [load_curves(path) for path in paths]
    except (Stop, ValueError) as error:
        print(f"dsv41 plot: {error}", file=sys.stderr)
        return ExitCode.USAGE
    output: Path = args.output or metrics_file(paths[0]).parent / "plots" / "metrics.png"
    try:
        draw(curves, output)
    except OSError as error:
        print(
            f"dsv41 plot: cannot write {output}: {error.strerror or error}; use -o", file=sys.stderr
        )
        return ExitCode.CANNOT_CREATE
    print(output)
    return ExitCode.DONE


def _meant(text: str, runs_dir: Path) -> Path:
    path = Path(text)
    if path.is_file() or (path / "metrics.jsonl").is_file():
        return path
    return named(text, runs_dir, other="a metrics.jsonl").path
