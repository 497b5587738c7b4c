"""A cluster for all tests of this folder, and a user's place whose commands speak to it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from launcher.run_dir import RunFolder
from tests.end_to_end.conftest import Place, place  # noqa: F401
from tests.slurm.cluster import Cluster, missing

PATIENCE = 240.0


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    cluster.start()
    yield cluster
    cluster.stop()


@dataclass
class Submitted:
    """A run in the queue, and its job."""

    folder: RunFolder
    job: str
    cluster: Cluster

    def facts(self) -> dict[str, str]:
        return self.cluster.job(self.job)

    def until(self, wanted: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not wanted():
            assert time.monotonic() < deadline, (what, self.facts(), self.log())
            time.sleep(0.5)

    def until_step(self, step: int) -> None:
        self.until(lambda: len(self.steps()) >= step, f"step {step}")

    def until_state(self, *states: str) -> None:
        self.until(lambda: self.facts()["JobState"] in states, " or ".join(states))

    def metrics(self) -> list[dict[str, Any]]:
        file = self.folder.path / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics()]

    def log(self) -> str:
        file = self.folder.path / f"slurm-{self.job}.log"
        return file.read_text() if file.exists() else ""

    def end_of(self, attempt: int) -> dict[str, Any]:
        """The last event of an attempt."""
        lines = self.folder.attempt(attempt).events_file.read_text().splitlines()
        return json.loads(lines[-1])


@dataclass
class Login:
    """A user's place on the login node."""

    place: Place
    cluster: Cluster

    def submit(self, *words: str, faults: str = "") -> Submitted:
        env = {"DSV41_FAULTS": faults} if faults else {}
        ended = self.place.train(*self.place.small, "launcher=slurm", *words, env=env)
        assert ended.code == 0, ended.text
        job = re.search(r"^Job (\d+)$", ended.out, re.MULTILINE)
        assert job, ended.text
        return Submitted(RunFolder(self.place.runs()[-1]), job[1], self.cluster)


@pytest.fixture
def login(place: Place, cluster: Cluster) -> Iterator[Login]:  # noqa: F811
    place.env["SLURM_CONF"] = str(cluster.conf)
    yield Login(place, cluster)
    cluster.run("scancel", "--user=root", check=False)
