"""What the system allows a process: files, processes, locked and shared memory."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from launcher.doctor.check import Finding

FILES = 4096  # checkpoint parts, loaders' pipes and one connection to each peer
PROCESSES = 4096
SHARED_BYTES = 1 << 30
SHM = Path("/dev/shm")
INFINITE = resource.RLIM_INFINITY


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == INFINITE or soft >= FILES:
        return Finding("ok", f"open files: {_shown(soft)}")
    how = f"ulimit -n {FILES}" if hard == INFINITE or hard >= FILES else "ask for a higher limit"
    return Finding("warn", f"open files: {soft:,}, at most {_shown(hard)}", how)


def processes() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == INFINITE or soft >= PROCESSES:
        return Finding("ok", f"processes: {_shown(soft)}")
    return Finding("warn", f"processes: {soft:,} of this user", f"ulimit -u {PROCESSES}")


def locked_memory(*, needed: bool) -> Finding:
    """needed: the run keeps tables in pinned memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == INFINITE else f"{soft / 1e6:,.0f} MB"
    found = f"locked memory: {shown}"
    if soft == INFINITE or not needed:
        return Finding("ok", found)
    fix = "ulimit -l unlimited (InfiniBand and pinned memory need it; ask whoever runs the cluster)"
    return Finding("warn", found, fix)


def shared_memory() -> Finding:
    if not SHM.is_dir():
        return Finding("ok", f"{SHM} is not used on this system")
    usage = shutil.disk_usage(SHM)
    found = f"{SHM}: {usage.free / 1e9:,.1f} of {usage.total / 1e9:,.1f} GB free"
    if not os.access(SHM, os.W_OK):
        return Finding("fail", f"{SHM} is not writable", f"chmod 1777 {SHM}")
    if usage.free >= SHARED_BYTES:
        return Finding("ok", found)
    fix = "batches and messages of ranks pass through it; in a container --shm-size=8g or "
    return Finding("warn", found, f"{fix}--ipc=host, else mount -o remount,size=8g {SHM}")


def _shown(limit: int) -> str:
    return "unlimited" if limit == INFINITE else f"{limit:,}"
