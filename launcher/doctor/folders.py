"""The folders that a run writes to: whether they do what a run relies on, and have room."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launcher.doctor.check import Finding
from trainer.disk import describe_disk, megabytes, mount_point, nearest_existing, sync_folder

SKEW_WARN_S = 5.0
LEAST_BYTES = 1 << 30  # where nothing is known of the run
ANOTHER = "choose another place with runs_dir=FOLDER"


def works(folder: Path) -> Finding:
    """What runs need of runs_dir: files that last, names that change at once, locks that hold."""
    step = "making a folder in it"
    try:
        with _scratch(folder) as place:
            step = "writing and syncing a file"
            first, second = place / "a", place / "b"
            with first.open("wb") as file:
                file.write(b"whole")
                file.flush()
                os.fsync(file.fileno())
            second.write_bytes(b"old")
            step = "renaming over a file"
            first.rename(second)
            sync_folder(place)
            step = "reading it back"
            if second.read_bytes() != b"whole" or first.exists():
                return Finding("fail", f"{folder}: {step} gave something else", ANOTHER)
            step = "locking"
            if not _lock_holds(place):
                return Finding("fail", f"{folder}: two processes can lock it at once", ANOTHER)
            step = "removing what was made"
    except OSError as error:
        fix = ANOTHER
        if step == "locking" and error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            fix = f"mount it with locks (Lustre: -o flock), or {ANOTHER}"
        return Finding("fail", f"{folder}: {step} failed: {error.strerror or error}", fix)
    mount = mount_point(nearest_existing(folder))
    kind = file_system(mount)
    text = f"{folder} on {mount} ({kind}): write, sync, rename, lock all work"
    return Finding("ok", f"{text}; only from this machine, other nodes must see the same folder")


def clock(folder: Path) -> Finding:
    """This machine's clock against that of the file server, which dates the files."""
    try:
        with _scratch(folder) as place:
            before = time.time()
            (place / "now").write_bytes(b"x")
            stamp = (place / "now").stat().st_mtime
            after = time.time()
    except OSError as error:
        return Finding("fail", f"{folder}: {error.strerror or error}", ANOTHER)
    # A file's time may come from a coarse clock that is up to a tick behind.
    skew = max(before - 0.02 - stamp, stamp - after, 0.0)
    text = f"{folder} is dated {skew:.1f} s apart from this machine"
    if skew <= SKEW_WARN_S:
        return Finding("ok", text)
    return Finding("warn", text, "let both follow the same time server (chrony, ntpd)")


def room(folder: Path, *, needed: int | None, why: str = "") -> Finding:
    """Free bytes where runs lie, against `needed`; None = nothing is known of the run."""
    there = nearest_existing(folder)
    free = shutil.disk_usage(there).free
    found = describe_disk(there)
    if os.statvfs(there).f_files and not os.statvfs(there).f_favail:
        return Finding("fail", f"{found}, but no file can be added (inodes)", "remove files there")
    if needed is None:
        found += "; dsv41 doctor +experiment=… compares with what its checkpoints take"
        fix = "" if free >= LEAST_BYTES else f"free space there, or {ANOTHER}"
        return Finding("warn" if fix else "ok", found, fix)
    found += f"; {why} take {megabytes(needed)}"
    if free >= needed:
        return Finding("ok", found)
    return Finding("fail", found, f"free space there, lower checkpoint.keep, or {ANOTHER}")


def caches(folders: Mapping[str, Path]) -> Finding:
    """Whether each cache can be written to. folders: by the setting that moves it."""
    bad = []
    for setting, folder in folders.items():
        try:
            with _scratch(folder) as place:
                (place / "x").write_bytes(b"x")
        except OSError as error:
            bad.append((setting, f"{folder}: {error.strerror or error}"))
    if bad:
        settings = ", ".join(setting for setting, _ in bad)
        fix = f"make them writable, or choose other folders: {settings}"
        return Finding("fail", "; ".join(text for _, text in bad), fix)
    return Finding("ok", ", ".join(dict.fromkeys(str(f) for f in folders.values())))


def cache_folders(environ: Mapping[str, str], *, data: Path) -> dict[str, Path]:
    """Caches of the data, of Hugging Face, of compiled kernels, and temporary files."""
    home = Path.home()
    base = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    return {
        "data.cache_dir": data,
        "HF_HOME": Path(environ.get("HF_HOME") or base / "huggingface"),
        "TRITON_CACHE_DIR": Path(environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "TMPDIR": Path(tempfile.gettempdir()),
    }


def file_system(mount: Path) -> str:
    """The type of the file system mounted there, as the system calls it."""
    try:
        lines = Path("/proc/mounts").read_text("utf-8").splitlines()
    except OSError:
        return "unknown"
    kinds = [line.split()[2] for line in lines if line.split()[1] == str(mount)]
    return kinds[-1] if kinds else "unknown"


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder in `folder`, or where that would be made; nothing of it stays."""
    place = nearest_existing(folder) / f".dsv41-doctor-{secrets.token_hex(4)}"
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _lock_holds(place: Path) -> bool:
    first, second = os.open(place, os.O_RDONLY), os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    finally:
        os.close(first)
        os.close(second)
