"""Names, ports and services that a run may need."""

from __future__ import annotations

import shutil
import socket
from urllib.parse import urlsplit

from launcher.backends.ray.config import RayConfig, host_and_port
from launcher.backends.ray.reach import no_head
from launcher.doctor.check import Finding, Level, output_of

PATIENCE_S = 3.0
SLURM = ("sbatch", "srun", "squeue", "scontrol")
WANDB = "https://api.wandb.ai"


def host_name(*, nodes: int) -> Finding:
    """Whether this machine's own name leads to an address that other nodes can use."""
    name = socket.gethostname()
    level = "fail" if nodes > 1 else "warn"
    fix = (
        f"put {name} with this machine's address into DNS or /etc/hosts; a run on several nodes "
        "needs it, or launcher.torchrun.host=ADDRESS"
    )
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as error:
        return Finding(level, f"{name} does not resolve: {error.strerror or error}", fix)
    if all(address.startswith("127.") or address == "::1" for address in found):
        return Finding(level, f"{name} is {', '.join(found)}, which only this machine reaches", fix)
    return Finding("ok", f"{name} is {', '.join(found)}")


def port(wanted: int | None) -> Finding:
    """Whether ranks can meet at the port that the configuration names, or at any."""
    try:
        with socket.socket() as probe:
            probe.bind(("", wanted or 0))
            got = probe.getsockname()[1]
            probe.listen(1)
            with socket.create_connection(("127.0.0.1", got), timeout=PATIENCE_S):
                pass
    except OSError as error:
        what = f"port {wanted}" if wanted else "any free port"
        fix = "use launcher.torchrun.port=null for a free one" if wanted else "see the firewall"
        return Finding("fail", f"{what} cannot be used: {error.strerror or error}", fix)
    return Finding("ok", f"port {got} can be listened on and reached from here")


def wandb(base: str | None) -> Finding:
    """Whether Weights & Biases answers; a run without it records offline."""
    place = urlsplit(base or WANDB)
    host = place.hostname or ""
    number = place.port or (80 if place.scheme == "http" else 443)
    if problem := unreachable(host, number):
        fix = "wandb sync uploads later what is recorded offline; WANDB_BASE_URL names another one"
        return Finding("warn", f"{host}:{number}: {problem}", fix)
    return Finding("ok", f"{host}:{number} answers")


def ray(config: RayConfig | None, *, variable: str | None) -> Finding:
    """Whether the cluster of Ray answers that a run is to take place in. config: of a run with
    launcher=ray; variable: RAY_ADDRESS, which `auto` means."""
    if config is not None and config.address is None:
        return Finding("ok", "the run starts a cluster of its own (launcher.ray.address=null)")
    if config is not None and config.address != "auto":
        address, name = config.address, "launcher.ray.address"
    else:
        address, name = variable, "RAY_ADDRESS"
    level: Level = "warn" if config is None else "fail"
    if not address:
        found = "no address is given (RAY_ADDRESS)"
        return Finding("ok", found if config is None else "auto: found by Ray itself")
    place = host_and_port(address.rpartition("://")[2].rstrip("/"))
    if place is None or place[0] == "auto":
        return Finding("ok", f"{name}={address}: found by Ray itself")
    if problem := no_head(*place, seconds=PATIENCE_S):
        other = "; null starts one here" if name != "RAY_ADDRESS" else ""
        fix = f"start it (ray start --head prints its address), or correct {name}{other}"
        return Finding(level, f"{address}: {problem}", fix)
    return Finding("ok", f"{address} answers")


def slurm(*, needed: bool) -> Finding:
    """Slurm's commands, and whether its controller answers."""
    missing = [tool for tool in SLURM if shutil.which(tool) is None]
    if len(missing) == len(SLURM):
        found = "no Slurm on this machine"
        fix = "log in to a submit host, or use another launcher"
        return Finding("fail", found, fix) if needed else Finding("ok", found)
    if missing:
        fix = "install Slurm's client tools, or put them on PATH"
        return Finding("fail" if needed else "warn", f"missing: {', '.join(missing)}", fix)
    told = output_of(["sinfo", "--noheader", "--format=%P %a %D"], timeout_s=PATIENCE_S)
    if told is None:
        fix = "see scontrol ping and the Slurm controller's log"
        return Finding("fail" if needed else "warn", "sinfo gets no answer", fix)
    partitions = ", ".join(" ".join(line.split()) for line in told.splitlines()) or "none"
    return Finding("ok", f"partitions (name, state, nodes): {partitions}")


def unreachable(host: str, number: int) -> str:
    """Why no connection can be made; empty when one can."""
    try:
        with socket.create_connection((host, number), timeout=PATIENCE_S):
            return ""
    except OSError as error:
        return str(error.strerror or error)
