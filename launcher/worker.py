"""One rank: read the frozen configuration, train, and write how it ended, in every case.

As a process of its own: `python -P -m launcher.worker RUN_DIR ATTEMPT`, with PYTHONPATH on the
run's code snapshot and RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment; as a task
of srun, Slurm's variables stand for the first two. Never runs Hydra.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import own_packages
from launcher.backends.protocol import SUPERVISED
from launcher.failures import outcome_of, terminable
from launcher.guard import die_with_parent
from launcher.health import require_healthy_node
from launcher.problems import Stop
from launcher.resume import continued
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, RunFolder
from launcher.tee import logged
from trainer.exit_codes import ExitCode
from trainer.heartbeat import Heartbeat
from trainer.outcome import Outcome

if TYPE_CHECKING:
    import torch

LEAST_PATIENCE_S = 1800.0  # of a collective
USAGE = "usage: python -P -m launcher.worker RUN_DIR ATTEMPT    (with RANK and WORLD_SIZE set)"


def main(argv: list[str] | None = None) -> int:
    """The rank that the environment names, of the run in argv[0] and its attempt argv[1]."""
    supervised = bool(os.environ.get(SUPERVISED))
    if supervised:
        die_with_parent()
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2 or not argv[1].isdecimal():
        print(USAGE, file=sys.stderr)
        return ExitCode.USAGE
    folder = RunFolder(Path(argv[0]).absolute())
    attempt = folder.attempt(int(argv[1]))
    try:
        rank, world = _place()
        config = _frozen(folder, attempt)
    except Stop as stop:
        print(stop.message, file=sys.stderr)
        return stop.code
    attempt.path.mkdir(parents=True, exist_ok=True)

    def work(settle: Callable[[], None]) -> Outcome:
        _check_origin(folder)
        _check_world(config, world)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        require_healthy_node(config, local_rank=local_rank)
        device = _device(local_rank)
        with _process_group(world, device, hang_s=config.resilience.hang_s):
            try:
                return _train(config, folder, attempt, device)
            finally:
                settle()

    outcome = run_rank(work, attempt=attempt, rank=rank)
    if outcome.message and rank == 0 and not supervised:  # a supervisor says the first cause, once
        print(outcome.message, file=sys.stderr)
    return outcome.code


def run_here(config: RunConfig, folder: RunFolder, attempt: Attempt) -> Outcome:
    """The only rank of a run, in this process; returns how it ended instead of raising."""
    return run_rank(
        lambda settle: _train(config, folder, attempt, _device(0)), attempt=attempt, rank=0
    )


def run_rank(
    work: Callable[[Callable[[], None]], Outcome], *, attempt: Attempt, rank: int
) -> Outcome:
    """Do `work` with all output in the rank's log, and leave its outcome file whatever happens.

    work: calls what it is given once it knows how it ends, before it cleans up: from then on no
    SIGTERM changes that. Only rank 0 speaks on the terminal. A traceback goes to the log alone.
    """
    with terminable() as settle:
        with logged(attempt.log(rank), speaks=rank == 0) as log:
            try:
                with Heartbeat(attempt.path, rank=rank):
                    outcome = work(settle)
            except BaseException as error:
                settle()
                log.write(traceback.format_exc())
                outcome = outcome_of(error, log=attempt.log(rank))
            settle()
            end = f"{outcome.reason}, exit code {int(outcome.code)}. {outcome.message}"
            log.write(f"outcome: {end}\n")
        try:
            attempt.write_outcome(rank, outcome)
        except OSError as error:  # a full disk; the exit code still tells
            print(f"{attempt.outcome_file(rank)}: {error.strerror}", file=sys.stderr)
    return outcome


def _device(local_rank: int) -> torch.device:
    from trainer.device import choose_device

    try:
        return choose_device(local_rank)
    except ValueError as error:
        raise Stop(ExitCode.CONFIG, str(error)) from error


def _train(config: RunConfig, folder: RunFolder, attempt: Attempt, device: torch.device) -> Outcome:
    from trainer.loop import train
    from trainer.ranks import Ranks

    return train(
        config,
        run_dir=folder.path,
        attempt=attempt.number,
        ranks=Ranks.from_process_group(),
        device=device,
        resume=attempt.number > 1 or folder.lineage() is not None,
        say=_say,
        sources=attempt.sources(),
    )


# What srun tells a task, by the names that torch knows.
FROM_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}


def _place() -> tuple[int, int]:
    """This rank and the number of all; also where only srun has told them."""
    if "RANK" not in os.environ and "SLURM_STEP_ID" in os.environ:
        found = {name: os.environ.get(theirs) for name, theirs in FROM_SLURM.items()}
        os.environ.update({name: value for name, value in found.items() if value is not None})
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise Stop(
            ExitCode.USAGE, f"RANK and WORLD_SIZE must be set to whole numbers ({error}).\n{USAGE}"
        ) from error


def _frozen(folder: RunFolder, attempt: Attempt) -> RunConfig:
    try:
        return continued(folder, attempt.given())
    except OSError as error:
        raise Stop(
            ExitCode.CONFIG,
            f"{folder.path} holds no readable config.yaml ({error.strerror}); name a run's folder",
        ) from error


def _check_origin(folder: RunFolder) -> None:
    """The run's own snapshot, or a bug: code edited since would train in silence."""
    found = own_packages.strangers(folder.code)
    if found:
        raise Stop(
            ExitCode.BUG,
            f"This rank must run the code in {folder.code}, but it imported {', '.join(found)}.\n"
            f"Start it with PYTHONSAFEPATH=1 and PYTHONPATH={folder.code}",
        )


def _check_world(config: RunConfig, world: int) -> None:
    planned = config.parallel.world
    if world != planned:
        raise Stop(
            ExitCode.CONFIG,
            f"WORLD_SIZE={world}, but the plan has {planned} rank(s) (parallel.dp_replicate="
            f"{config.parallel.dp_replicate} x parallel.dp_shard={config.parallel.dp_shard} x "
            f"parallel.cp={config.parallel.cp}).\n"
            f"Start {planned} rank(s), or make a run with another mesh.",
        )


@contextmanager
def _process_group(world: int, device: torch.device, *, hang_s: float) -> Iterator[None]:
    """The default process group of a run with several ranks; none for one rank."""
    if world == 1:
        yield
        return
    import torch.distributed as dist

    # Flags and counts travel as CPU tensors, on a side path of their own.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    # A collective that gives up first would blame the rank that waits; the supervisor's watchdog
    # names the one it waits for.
    patience = timedelta(seconds=max(LEAST_PATIENCE_S, 4 * hang_s))
    dist.init_process_group(backend, timeout=patience)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
