import dataclasses
from itertools import pairwise

import pytest

from tests.builders import optim_config
from trainer.schedule import learning_rate

OPTIM = optim_config(lr=2.6e-4, warmup_steps=4, hold_steps=3, decay_steps=8, final_lr=2.6e-5)


def test_warm_up_is_linear_and_starts_above_zero():
    rates = [learning_rate(step, OPTIM) for step in range(1, 5)]
    assert rates == pytest.approx([0.65e-4, 1.3e-4, 1.95e-4, 2.6e-4])


def test_the_peak_is_held():
    assert [learning_rate(step, OPTIM) for step in (4, 5, 6, 7)] == [2.6e-4] * 4


def test_the_decay_is_half_a_cosine():
    middle = (2.6e-4 + 2.6e-5) / 2
    assert learning_rate(7 + 4, OPTIM) == pytest.approx(middle)
    quarter = middle + (2.6e-4 - 2.6e-5) / 2 * 0.7071067811865476  # cos 45 degrees
    assert learning_rate(7 + 2, OPTIM) == pytest.approx(quarter)
    rates = [learning_rate(step, OPTIM) for step in range(7, 16)]
    assert all(later < earlier for earlier, later in pairwise(rates))


def test_the_floor_is_exact_and_lasts():
    assert [learning_rate(step, OPTIM) for step in (15, 16, 10**9)] == [2.6e-5] * 3


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert learning_rate(1, dataclasses.replace(OPTIM, warmup_steps=0)) == 2.6e-4


def test_without_decay_the_rate_stays():
    constant = dataclasses.replace(OPTIM, decay_steps=0, hold_steps=0)
    assert [learning_rate(step, constant) for step in (4, 5, 1000)] == [2.6e-4] * 3
