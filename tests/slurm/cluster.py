"""A Slurm cluster on this machine: a controller and two nodes that share its cores.

    python tests/slurm/cluster.py DIR    # runs until Ctrl-C; then, elsewhere: export SLURM_CONF=…

Jobs of the partition `high` take nodes away from those of `low`, which get GRACE_S seconds' notice
and are queued again. Needs root, and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("n1", "n2")
GRACE_S = 20
DAEMONS = ("slurmctld", "slurmd", "munged", "munge", "sbatch", "srun", "scontrol")
MUNGE_KEY = Path("/etc/munge/munge.key")


def missing() -> str | None:
    """Why no cluster can be started here; None if one can."""
    if os.geteuid():
        return "starting a Slurm cluster needs root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    absent = [name for name in DAEMONS if shutil.which(name, path=path) is None]
    return f"{', '.join(absent)} not found: apt install slurm-wlm munge" if absent else None


@dataclass
class Cluster:
    """Started by `start`; SLURM_CONF=`conf` makes Slurm's commands speak to it."""

    folder: Path
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        """Returns once both nodes take jobs."""
        _start_munge()
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        ports = _free_ports(1 + len(NODES))
        self.conf.write_text(_configuration(self.folder, ports))
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        deadline = time.monotonic() + 90
        while self._idle() < len(NODES):
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the nodes do not come up; see the logs in {self.folder}")
            time.sleep(0.5)

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        self.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        self.run("scancel", "--user=root", check=False)
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
        self._processes.clear()

    def run(self, *words: str, check: bool = True) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        words = [word.partition("=") for word in str(shown).split() if "=" in word]
        return {name: value for name, _, value in words}

    def _idle(self) -> int:
        listed = self.run("sinfo", "--noheader", "--states=idle", "--format=%D", check=False)
        return max((int(word) for word in listed.split()), default=0)

    def _daemon(self, *words: str) -> None:
        program = shutil.which(words[0], path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        assert program is not None
        name = "-".join(word for word in words if not word.startswith("-"))
        with (self.folder / f"{name}.out").open("wb") as out:
            self._processes.append(
                subprocess.Popen(
                    [program, *words[1:], "-f", str(self.conf)],
                    env=self.environment,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )


def _configuration(folder: Path, ports: list[int]) -> str:
    host = socket.gethostname().partition(".")[0]
    settings = {
        "ClusterName": "here",
        "SlurmctldHost": host,
        "SlurmctldPort": ports[0],
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # A job that is queued again waits as long as a credential lives, two minutes by default.
        "AuthInfo": "cred_expire=6",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool" / "%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.%n.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd.%n.log",
        "SlurmdParameters": "config_overrides",
        "ProctrackType": "proctrack/pgid",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=5,bf_interval=5",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "ReturnToService": 2,
        "KillWait": 30,
        "MinJobAge": 600,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    for node, port in zip(NODES, ports[1:], strict=True):
        lines.append(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=4000 State=UNKNOWN"
        )
    nodes = ",".join(NODES)
    lines += [
        f"PartitionName=low Nodes={nodes} Default=YES PriorityTier=1 PreemptMode=REQUEUE "
        f"GraceTime={GRACE_S} State=UP",
        f"PartitionName=high Nodes={nodes} PriorityTier=9 PreemptMode=OFF State=UP",
    ]
    return "\n".join(lines) + "\n"


def _start_munge() -> None:
    """Slurm's daemons and commands trust each other through munge, one for the machine."""
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
        return
    owner = pwd.getpwnam("munge")
    if not MUNGE_KEY.is_file():
        MUNGE_KEY.write_bytes(secrets.token_bytes(1024))
        MUNGE_KEY.chmod(0o400)
        os.chown(MUNGE_KEY, owner.pw_uid, owner.pw_gid)
    sockets = Path("/run/munge")
    sockets.mkdir(exist_ok=True)
    os.chown(sockets, owner.pw_uid, owner.pw_gid)
    subprocess.run(["runuser", "-u", "munge", "--", "munged"], check=True)


def _free_ports(count: int) -> list[int]:
    opened = [socket.socket() for _ in range(count)]
    try:
        for one in opened:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in opened]
    finally:
        for one in opened:
            one.close()


def main() -> None:
    if (reason := missing()) is not None:
        sys.exit(reason)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cluster = Cluster(Path(sys.argv[1]).absolute())
    cluster.start()
    print(f"export SLURM_CONF={cluster.conf}", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        cluster.stop()


if __name__ == "__main__":
    main()
