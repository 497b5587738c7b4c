"""`dsv41 verify CASE...`: run reference cases and say which gates hold."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from launcher.verify.case import Case, CaseError, Unsupported, open_case
from launcher.verify.gates import Check
from launcher.verify.report import Report
from trainer.exit_codes import ExitCode

GATE_FAILED = 1
KINDS = ("engram_hash", "quantization", "image_sizing", "model", "optimizer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare this installation with reference cases, on this machine. Prints one line a case. "
        "Exit code: 0 all gates hold, 1 a gate failed, 2 no such case, 65 a case cannot be read."
    )
    parser.add_argument("cases", nargs="+", type=Path, metavar="CASE", help="folder of a case")
    parser.add_argument(
        "--strict", action="store_true", help="a skipped case counts as a failed gate"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Check every case in turn, print, and return the exit code.

    A case that cannot be read stops no other; its code outranks that of a failed gate, since the
    verification is then incomplete.
    """
    width = max(len(folder.resolve().name) for folder in args.cases)
    reports: list[Report] = []
    codes: set[int] = set()
    for folder in args.cases:
        report, code = check_folder(folder, strict=args.strict)
        reports.append(report)
        codes.add(code)
        if not args.json:
            print(report.line(width=width), flush=True)
    code = next(c for c in (ExitCode.BAD_DATA, ExitCode.USAGE, GATE_FAILED, 0) if c in codes)
    if args.json:
        print(json.dumps({"exit_code": int(code), "cases": [r.to_dict() for r in reports]}))
    return int(code)


def check_folder(folder: Path, *, strict: bool = False) -> tuple[Report, int]:
    """One case's report and exit code. Nothing a case's files hold makes this raise CaseError."""
    started = time.perf_counter()
    name, kind = folder.resolve().name, ""
    try:
        case = open_case(folder)
        kind = case.kind
        checks = _checker(kind)(case)
    except Unsupported as skipped:
        return Report(name, kind, "skipped", str(skipped)), GATE_FAILED if strict else 0
    except CaseError as error:
        return Report(name, kind, "error", str(error)), error.code
    report = Report.of(name, kind, checks, seconds=time.perf_counter() - started)
    return report, 0 if report.status == "pass" else GATE_FAILED


def _checker(kind: str) -> Callable[[Case], list[Check]]:
    if kind not in KINDS:
        raise Unsupported(f"kind {kind!r} is not known here; known are {', '.join(KINDS)}")
    # Kinds load when met: the model kind brings in the whole model.
    return importlib.import_module(f"launcher.verify.{kind}").check
