"""Notices that the ranks of an attempt hang, or that one of them holds up the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.run_dir import Attempt
from launcher.watch.beats import Beat, Beats
from launcher.watch.blame import blame
from launcher.watch.slow import slow_ranks
from launcher.watch.stacks import gather, state_of, tidy
from trainer.exit_codes import ExitCode
from trainer.heartbeat import INTERVAL
from trainer.outcome import Outcome

PATIENCE = 3  # times hang_s: for the start, the first step, which may compile, and for saves
PATIENT = ("start", "save", "close")
LEAST_SILENCE = 4 * INTERVAL  # seconds without a sign of life that mean anything
OURS = 30.0  # seconds between two looks that mean that this process itself stood still
FILES_PER_SECOND = 200  # that looking may cost a shared folder
WINDOW_STEPS, WINDOW_S = 20, 30.0  # over which ranks are compared
REPEAT_STEPS = 100  # between two reports of the same rank


@dataclass(frozen=True)
class Hang:
    """rank: the one the others wait for, None where none stands out; phase: where it is. step: the
    furthest that any rank has come. message: for a person, the rank and what it does on the first
    line. stacks: the file with those of all ranks."""

    rank: int | None
    phase: str
    step: int
    message: str
    stacks: Path | None

    def outcome(self) -> Outcome:
        """How the attempt ended, once its processes are."""
        return Outcome(ExitCode.HANG, "hang", max(0, self.step - 1), self.message)


class Watchdog:
    """Over the `world` ranks of an attempt. hang_s: a hang is when no rank has finished anything
    for so long: neither a step nor a phase, nor a slice of a save; PATIENCE times as long while any
    rank starts, saves, or is in the first step, and when nothing is heard of any, since that may be
    the folder's fault. 0 = never. say: told of ranks that are slow.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        world: int,
        hang_s: float,
        say: Callable[[str], None],
        now: float,
        window_steps: int = WINDOW_STEPS,
        window_s: float = WINDOW_S,
    ) -> None:
        self._attempt = attempt
        self._world = world
        self._hang_s = hang_s
        self._silent_s = max(LEAST_SILENCE, hang_s / 2)
        self._say = say
        self._window = window_steps, window_s
        self._beats = Beats(attempt, world, now=now)
        self._looked = self._compared = now
        self._base: dict[int, Beat] = {}
        self._told: dict[int, int] = {}

    def check(self, now: float) -> Hang | None:
        """Look at the ranks, at most every two seconds; the hang, if that is what it is.

        now: time.monotonic(). Returns within seconds, with a hang once all stacks are written.
        """
        if now - self._looked < max(INTERVAL, self._world / FILES_PER_SECOND):
            return None
        if now - self._looked > OURS:
            self._beats.forgive(now - self._looked)
        self._looked = now
        self._beats.read(now)
        self._compare(now)
        if self._hang_s and now - self._beats.finished > self._hang_s * self._patience(now):
            return self._hang(now)
        return None

    def close(self) -> None:
        """The attempt's processes have ended."""
        tidy(self._attempt)

    def _patience(self, now: float) -> int:
        beats = self._beats.of.values()
        if len(beats) < self._world or all(beat.steps == 0 for beat in beats):
            return PATIENCE
        # What a silent rank did last is no excuse for the others.
        heard = [beat for beat in beats if now - beat.seen <= self._silent_s]
        if any(beat.phase in PATIENT for beat in heard):
            return PATIENCE
        return PATIENCE if not heard and not self._states() else 1

    def _states(self) -> dict[int, str]:
        return {r: words for r, beat in self._beats.of.items() if (words := state_of(beat))}

    def _hang(self, now: float) -> Hang:
        beats = self._beats.of
        found = blame(
            beats, world=self._world, now=now, silent_s=self._silent_s, states=self._states()
        )
        message = f"Nothing was finished for {now - self._beats.finished:.0f} s. {found.text}"
        stacks = None
        try:
            stacks = gather(self._attempt, beats)
            message += f"\nThe stacks of all ranks are in {stacks}"
        except OSError as error:
            message += f"\nTheir stacks could not be written: {error.strerror or error}"
        phase = found.beat.phase if found.beat else "start"
        step = max((beat.step for beat in beats.values()), default=0)
        return Hang(found.rank, phase, step, message, stacks)

    def _compare(self, now: float) -> None:
        beats = self._beats.of
        if self._world == 1 or len(beats) < self._world:
            return
        if not self._base:
            # The first step is not like the others.
            if all(beat.steps for beat in beats.values()):
                self._base, self._compared = dict(beats), now
            return
        steps, seconds = self._window
        done = min(beats[rank].steps - self._base[rank].steps for rank in beats)
        if done < steps or now - self._compared < seconds:
            return
        for slow in slow_ranks(self._base, beats):
            at = beats[slow.rank].steps
            if at - self._told.get(slow.rank, -REPEAT_STEPS) >= REPEAT_STEPS:
                self._told[slow.rank] = at
                self._say(slow.text)
                with suppress(OSError):
                    self._attempt.event("slow rank", **asdict(slow))
        self._base, self._compared = dict(beats), now
