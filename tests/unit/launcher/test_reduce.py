"""The first cause out of many ranks' ends."""

from __future__ import annotations

from launcher.reduce import Death, reduce
from trainer.exit_codes import ExitCode
from trainer.outcome import LOST_PEER, Outcome


def done(step: int = 9) -> Outcome:
    return Outcome(ExitCode.DONE, "done", step, "All steps are done.", ended=5.0)


def victim(at: float) -> Outcome:
    return Outcome(ExitCode.AGAIN, LOST_PEER, 4, "Lost another rank: closed", ended=at)


def bug(at: float, text: str) -> Outcome:
    return Outcome(ExitCode.BUG, "bug", 0, text, ended=at)


def test_all_are_done() -> None:
    assert reduce({0: done(), 1: done()}, [], world=2) == done()


def test_the_earliest_cause_is_told_with_its_rank_and_victims_are_not() -> None:
    outcomes = {0: victim(1.0), 1: bug(3.0, "later"), 2: bug(2.0, "first"), 3: victim(4.0)}
    found = reduce(outcomes, [], world=4)
    assert (found.code, found.message) == (ExitCode.BUG, "Rank 2: first")


def test_what_one_rank_has_heard_from_another_is_the_others() -> None:
    ends = {0: bug(1.0, "Rank 1: no space"), 1: bug(2.0, "no space")}
    assert reduce(ends, [], world=2).message == "Rank 1: no space"


def test_what_ranks_have_agreed_on_is_nobodys() -> None:
    ends = {rank: Outcome(ExitCode.DIVERGED, "diverged", 4, "inf", ended=rank) for rank in (0, 1)}
    assert reduce(ends, [], world=2).message == "inf"


def test_a_rank_that_died_without_a_word_is_the_cause_of_its_victims() -> None:
    found = reduce({0: victim(1.0)}, [Death(1, "was killed by signal 9 (SIGKILL)")], world=2)
    assert found.code == ExitCode.AGAIN
    assert found.message == "Rank 1 was killed by signal 9 (SIGKILL) after step 4."


def test_but_not_where_another_says_why() -> None:
    full = Outcome(ExitCode.IO_ERROR, "disk full", 4, "no space", ended=2.0)
    assert reduce({0: full}, [Death(1, "killed by signal 15")], world=2).code == ExitCode.IO_ERROR


def test_an_agent_that_died_is_named_when_no_rank_is() -> None:
    found = reduce({}, [Death(None, "The agent was killed by signal 9")], world=2)
    assert found.message == (
        "The agent was killed by signal 9. Rank 0 (and 1 more) ended without a word."
    )


def test_stopped_together() -> None:
    stopped = Outcome(ExitCode.INTERRUPTED, "stopped", 3, "Stopped after step 3 of 9.")
    assert reduce({0: stopped, 1: stopped}, [], world=2) == stopped


def test_only_victims_are_tried_again() -> None:
    found = reduce({0: victim(2.0), 1: victim(1.0)}, [], world=2)
    assert (found.code, found.reason) == (ExitCode.AGAIN, LOST_PEER)
    assert found.message.startswith("Rank 1: ")
