"""Ranks under torchrun's elastic agent: all on this machine, or an equal share on each of several.

The agent only starts processes and notices when one dies; it restarts none, since what comes after
an attempt is the supervisor's to decide, and it would report every exit code as 1.
"""

from __future__ import annotations

import json
import math
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launcher.backends.protocol import Plan
from launcher.config import TorchrunConfig
from launcher.guard import as_parent
from launcher.problems import Stop
from launcher.processes import end_tree, killed_by, send, without_rank
from launcher.reduce import Death
from launcher.run_dir import Attempt, RunFolder
from trainer.disk import put_text
from trainer.exit_codes import ExitCode

_EXIT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")


class Torchrun:
    """The backend of launcher=torchrun, on the first node."""

    def __init__(self, config: TorchrunConfig, *, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say

    def start(self, attempt: Attempt, plan: Plan) -> Agent:
        """Write where the ranks meet, and start this machine's share."""
        host = self._host(plan)
        place = {"host": host, "port": self._port(host), "nodes": plan.nodes, "world": plan.world}
        put_text(meeting_file(attempt), json.dumps({**place, "grace_s": plan.grace_s}) + "\n")
        if plan.nodes > 1 and attempt.number == 1:
            others = "1" if plan.nodes == 2 else f"1 to {plan.nodes - 1}"
            self._say(
                f"This is node 0 of {plan.nodes}. On the other{'s' * (plan.nodes > 2)}, for "
                f"NODE = {others}:  dsv41 join {plan.folder.path} --node NODE"
            )
        return Agent(attempt, plan, node=0, host=host, port=place["port"])

    def _host(self, plan: Plan) -> str:
        """The name that others find this machine by; never a guess, which would make every node a
        world of its own."""
        if plan.nodes == 1 and self._config.host is None:
            return "127.0.0.1"
        host = self._config.host or socket.gethostname()
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise Stop(
                ExitCode.CONFIG,
                f"The host name {host} does not resolve ({error.strerror or error}), so ranks "
                "cannot meet there.\n"
                "Give an address that all nodes reach: launcher.torchrun.host=ADDRESS",
            ) from error
        return host

    def _port(self, host: str) -> int:
        wanted = self._config.port or 0
        try:
            with socket.socket() as probe:
                probe.bind(("", wanted))
                return probe.getsockname()[1]
        except OSError as error:
            raise Stop(
                ExitCode.CONFIG,
                f"Port {wanted} of {host} is taken ({error.strerror}).\n"
                "Use another launcher.torchrun.port, or null for one that is free.",
            ) from error


class Agent:
    """The elastic agent of one node, in a session of its own: a Ctrl-C at the terminal reaches the
    supervisor alone, which tells the ranks in its own way."""

    def __init__(self, attempt: Attempt, plan: Plan, *, node: int, host: str, port: int) -> None:
        self._first = node * plan.ranks_per_node
        self._log = attempt.path / f"agent-{node:05d}.log"
        words = [
            *(sys.executable, "-P", "-m", "launcher.backends.agent"),
            *(f"--nnodes={plan.nodes}", f"--nproc-per-node={plan.ranks_per_node}"),
            *(f"--node-rank={node}", f"--master-addr={host}", f"--master-port={port}"),
            *("--max-restarts=0", "--monitor-interval=0.2"),
            f"--shutdown-timeout={math.ceil(plan.grace_s)}",  # after a SIGTERM to the agent
            *("-m", "launcher.worker", str(plan.folder.path), str(attempt.number)),
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                words,
                env={**without_rank(), **plan.environment(), **as_parent()},
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def poll(self) -> list[Death] | None:
        code = self._process.poll()
        if code is None:
            return None
        found = []
        for exit_code, local in _EXIT.findall(self._log.read_text("utf-8", errors="replace")):
            if int(exit_code) < 0:
                found.append(Death(self._first + int(local), killed_by(-int(exit_code))))
        if code < 0:
            found.append(Death(None, f"The agent {killed_by(-code)}"))
        return found

    def tell(self) -> None:
        """As a cluster does that takes this node away: the ranks get a SIGTERM, and are killed if
        they have not ended grace_s later."""
        send([self._process.pid], signal.SIGTERM)

    def kill(self) -> None:
        end_tree(self._process.pid)
        self._process.wait()


def meeting_file(attempt: Attempt) -> Path:
    """Where the first node says how the others find it."""
    return attempt.path / "rendezvous.json"


def join(folder: RunFolder, attempt: Attempt, *, node: int) -> Agent:
    """This machine's share of an attempt that the first node has begun. Stop 2 for a node that it
    has no place for."""
    place = json.loads(meeting_file(attempt).read_text("utf-8"))
    if not 0 < node < place["nodes"]:
        raise Stop(
            ExitCode.USAGE,
            f"node {node} has no place in {folder.path}, which runs on {place['nodes']} nodes; "
            f"use --node 1 to {place['nodes'] - 1}",
        )
    plan = Plan(folder, world=place["world"], nodes=place["nodes"], grace_s=place["grace_s"])
    return Agent(attempt, plan, node=node, host=place["host"], port=place["port"])
