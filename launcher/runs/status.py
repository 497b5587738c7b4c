"""`dsv41 status RUN`: one page about a run: what it is doing, how it got there, what to do next."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from launcher.checkpoints import Entry, entries
from launcher.decide import Next
from launcher.messages import FINAL
from launcher.problems import Stop
from launcher.runs.listing import parent_text, state_text
from launcher.runs.names import add_run, named
from launcher.runs.text import age, as_typed, moment, number
from launcher.runs.view import AttemptView, Heartbeat, RunView, heartbeats, read_json, view_of
from trainer.exit_codes import ExitCode
from trainer.progress import duration

SHOWN_RANKS = 8  # heartbeats in full; of more only those that stand out
SHOWN_ATTEMPTS = 10
SHOWN_NOTES = 3
FOLLOWS = {
    Next.AGAIN.value: "started again",
    Next.REQUEUE.value: "back to the queue",
    Next.STOP.value: "not started again",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows what a run is doing: its attempts and how each ended, the last metrics, the "
        "checkpoints (names and sizes are checked; dsv41 checkpoint verify reads them), the ranks, "
        "and what to do next."
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print the page and return the exit code."""
    try:
        folder = named(args.run, args.runs_dir)
    except Stop as stop:
        print(f"dsv41 status: {stop.message}", file=sys.stderr)
        return stop.code
    view = view_of(folder)
    saved = entries(folder.path / "checkpoints")
    ranks = heartbeats(folder.attempt(len(view.attempts))) if view.attempts else []
    if args.json:
        print(json.dumps(status_data(view, saved, ranks)))
    else:
        print("\n".join(page(view, saved, ranks)))
    return ExitCode.DONE


def status_data(view: RunView, saved: list[Entry], ranks: list[Heartbeat]) -> dict[str, Any]:
    """Everything that the page tells, as --json prints it."""
    attempts = [
        {**asdict(a), "outcome": a.outcome.to_dict() if a.outcome else None} for a in view.attempts
    ]
    return {
        **view.to_dict(),
        "attempts": attempts,
        "supervisor": read_json(view.folder.path / "supervisor.json") or None,
        "last": view.last or None,
        "evaluation": view.evaluated or None,
        "checkpoints": [asdict(entry) for entry in saved],
        "ranks": [asdict(beat) for beat in ranks],
        "lineage": view.lineage,
        "next": next_steps(view),
    }


def page(view: RunView, saved: list[Entry], ranks: list[Heartbeat]) -> Iterator[str]:
    """The lines of the page."""
    now = time.time()
    yield f"{view.label}: {headline(view)}"
    yield ""
    yield f"folder       {view.folder.path}"
    yield f"made         {moment(view.created)}, {age(now - view.created)} ago"
    yield f"last change  {moment(view.updated)}, {age(now - view.updated)} ago"
    if view.lineage:
        yield f"parent       {parent_text(view)}"
    supervisor = read_json(view.folder.path / "supervisor.json")
    if supervisor and view.state == "running":
        job = f", job {supervisor['job']}" if supervisor.get("job") else ""
        yield (
            f"supervisor   process {supervisor.get('pid')} on {supervisor.get('host')} "
            f"({supervisor.get('backend')}{job})"
        )
    if view.last:
        yield f"metrics      {metrics_text(view)}"
    yield from ["", "attempts"]
    older = len(view.attempts) - SHOWN_ATTEMPTS
    if older > 0:
        yield f"  {older} earlier ones (--json lists them)"
    for attempt in view.attempts[-SHOWN_ATTEMPTS:]:
        last = attempt.number == len(view.attempts)
        yield f"  {attempt_text(attempt, working=last and view.state == 'running')}"
        yield from (f"       {note}" for note in attempt.notes[-SHOWN_NOTES:])
    if not view.attempts:
        yield "  none yet"
    yield from ["", "checkpoints"]
    for entry in saved:
        yield from (f"  {line}" for line in entry.line().splitlines())
    if not saved:
        yield "  none yet"
    if ranks and view.state == "running":
        yield from ["", "ranks", *(f"  {line}" for line in rank_lines(ranks))]
    yield ""
    for title, command in next_steps(view).items():
        yield f"{title:<12} {command}"


def headline(view: RunView) -> str:
    """What it is doing, how far it is, and about how long it will take."""
    text = state_text(view)
    if view.state == "running":
        text += f" ({view.reason})"
    if view.total is None:
        return f"{text}, step {view.step:,}"
    share = f"{100 * view.step / max(1, view.total):.0f} %"
    text += f", step {view.step:,} of {view.total:,} ({share})"
    seconds = view.last.get("step_s")
    if view.state == "running" and isinstance(seconds, int | float):
        text += f", about {duration((view.total - view.step) * seconds)} left"
    return text


def metrics_text(view: RunView) -> str:
    """The figures of the last record."""
    last = view.last
    parts = [
        number(last.get("step"), "step {:,}"),
        number(last.get("loss"), "loss {:.3f}"),
        number(last.get("tokens_per_s"), "{:,.0f} tokens/s"),
        number(last.get("lr"), "lr {:.2e}"),
        number(last.get("grad_norm"), "grad norm {:.3g}"),
        number(last.get("tokens_total"), "{:,} tokens in all"),
        number(view.evaluated.get("eval_loss"), "held-out loss {:.3f}"),
    ]
    return "  ".join(part for part in parts if part)


def attempt_text(attempt: AttemptView, *, working: bool) -> str:
    """Number, begin, how long, and how it ended."""
    text = f"{attempt.number:>3}  {moment(attempt.started)}  "
    if attempt.ended is not None and attempt.started is not None:
        text += f"{age(attempt.ended - attempt.started):>7}  "
    else:
        text += " " * 9
    outcome = attempt.outcome
    if outcome is None:
        return text + ("working" if working else "ended without a word (killed, or the node died)")
    text += f"{outcome.reason} (exit code {int(outcome.code)}) after step {outcome.step:,}"
    first = outcome.message.partition("\n")[0]
    if first and outcome.code != ExitCode.DONE:
        text += f": {first}"
    follows = FOLLOWS.get(attempt.next)
    return f"{text} -> {follows} ({attempt.why})" if follows else text


def rank_lines(ranks: list[Heartbeat]) -> Iterator[str]:
    """What each rank does; of many, those that are behind, silent or in another phase."""
    shown = ranks
    if len(ranks) > SHOWN_RANKS:
        most = max(beat.step for beat in ranks)
        phases = [beat.phase for beat in ranks]
        usual = max(set(phases), key=phases.count)
        odd = [b for b in ranks if b.step < most or b.phase != usual or b.silent_s > 30]
        yield f"{len(ranks)} ranks, most in {usual}, at step {most:,}"
        shown = odd[:SHOWN_RANKS]
        if len(odd) > len(shown):
            yield f"{len(odd)} of them differ; the first {len(shown)}:"
    for beat in shown:
        phase = f"{beat.phase} for {age(beat.phase_s)}"
        phase += ", waiting for others" if beat.waiting else ""
        yield (
            f"rank {beat.rank:<5} step {beat.step:,}  {phase}, "
            f"heard of {age(beat.silent_s)} ago  (process {beat.pid} on {beat.host})"
        )


def next_steps(view: RunView) -> dict[str, str]:
    """Commands that make sense now, by what they are for."""
    where = as_typed(view.folder.path)
    logs = f"dsv41 logs {where}"
    if view.state == "running":
        return {"follow": f"{logs} -f", "stop": f"dsv41 stop {where}"}
    if view.state == "waiting":
        return {"follow": f"{logs} -f", "stop": f"dsv41 stop {where}"}
    if view.state == "done":
        return {
            "plot": f"dsv41 plot {where}",
            "sample": f"dsv41 generate {where} --prompt TEXT",
            "go on": f"dsv41 resume {where} train.steps={2 * (view.total or 1)}",
        }
    found = {"log": logs} if view.attempts else {}
    if view.outcome is not None and view.outcome.code in FINAL:
        return {**found, "then": f"dsv41 resume {where} NAME=VALUE (what has to change)"}
    return {**found, "resume": f"dsv41 resume {where}"}
