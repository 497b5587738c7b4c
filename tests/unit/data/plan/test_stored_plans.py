"""Plans are made once, whole or not at all, by whoever comes first."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from data.errors import CacheError, DataError
from data.plan import stored
from data.plan.settings import PlanSettings
from data.plan.stored import StoredPlans

SETTINGS = PlanSettings(32, 4, "split", 0.1, 1)


@pytest.fixture
def prepared(tmp_path, write_set, random_documents):
    lengths = np.random.default_rng(0).integers(2, 50, 100).tolist()
    return write_set(tmp_path / "set", random_documents(lengths), window_documents=40)


def plan_folders(prepared, window=0):
    return sorted(p.name for p in prepared.window_folder(window).iterdir() if p.is_dir())


def test_a_stored_plan_is_the_plan_and_is_made_once(prepared, monkeypatch):
    plans = StoredPlans(prepared, SETTINGS)
    found = plans.plan(0)
    made = stored.plan_window(
        window=0,
        offsets=prepared.offsets(0),
        spans=prepared.image_spans(0),
        settings=SETTINGS,
        origin=str,
    )
    for name in stored.ARRAYS:
        np.testing.assert_array_equal(getattr(found, name), getattr(made, name))
    assert found.training == made.training
    monkeypatch.setattr(stored, "plan_window", None)
    stored._open.cache_clear()
    assert plans.plan(0).training == made.training
    assert plans.training_packs(0) == made.training


def test_other_settings_have_plans_of_their_own(prepared):
    for settings in (
        SETTINGS,
        PlanSettings(64, 4, "split", 0.1, 1),
        PlanSettings(32, 4, "split", 0.1, 2),
    ):
        StoredPlans(prepared, settings).plan(0)
    assert len(plan_folders(prepared)) == 3
    for seed in (1, 2):  # without held-out documents the seed decides nothing
        StoredPlans(prepared, PlanSettings(32, 4, "split", 0.0, seed)).plan(0)
    assert len(plan_folders(prepared)) == 4


def test_a_failed_plan_leaves_nothing(prepared, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "sync_file", full)
    with pytest.raises(CacheError, match=r"needs about [\d,]+ bytes more, and the disk of .* free"):
        StoredPlans(prepared, SETTINGS).plan(0)
    assert plan_folders(prepared) == []


def test_a_damaged_plan_is_named(prepared):
    plans = StoredPlans(prepared, SETTINGS)
    plans.plan(1)
    [name] = plan_folders(prepared, 1)
    folder = prepared.window_folder(1) / name
    (folder / "starts.npy").write_bytes(b"short")
    stored._open.cache_clear()
    with pytest.raises(DataError, match=f"{name} is damaged.*remove it"):
        plans.plan(1)


def test_a_killed_planner_is_followed_by_another(prepared):
    """Its lock goes with it, and its half-written folder is replaced."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=_hold_lock, args=(prepared, ready))
    child.start()
    assert child.pid is not None
    assert ready.wait(60)
    plans = StoredPlans(prepared, SETTINGS)
    plans.plan_ahead(0)  # does not wait
    assert [name for name in plan_folders(prepared) if not name.endswith(".tmp")] == []
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    begin = time.monotonic()
    assert plans.plan(0).training > 0
    assert time.monotonic() - begin < 10
    [name] = plan_folders(prepared)
    assert not name.endswith(".tmp")


def _hold_lock(prepared, ready):
    plans = StoredPlans(prepared, SETTINGS)

    def hang(*_):
        ready.set()
        time.sleep(600)

    stored.sync_file = hang
    plans.plan(0)
