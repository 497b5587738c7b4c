"""What is installed here, and on what it will run."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata

from launcher.doctor.check import Finding, output_of
from model.kernels.build import built

SHOWN = ("torch", "hydra-core", "omegaconf", "transformers", "numpy", "ray", "wandb", "triton")
COMPILING_S = 30.0
OURS = "dsv41-train"
_DEVICES = """
import json, torch
cuda = torch.cuda
names = [cuda.get_device_name(i) for i in range(cuda.device_count())]
memory = [cuda.get_device_properties(i).total_memory for i in range(cuda.device_count())]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "names": names,
                  "memory": memory}))
"""


def versions() -> Finding:
    """Python and the packages, against what our own package asks for."""
    from packaging.requirements import Requirement

    parts = [f"python {platform.python_version()}"]
    try:
        parts.append(f"{OURS} {metadata.version(OURS)}")
        required = [Requirement(text) for text in metadata.requires(OURS) or ()]
    except metadata.PackageNotFoundError:
        required = []
    parts += [f"{name} {found}" for name in SHOWN if (found := installed(name))]
    wrong = []
    for need in required:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        have = installed(need.name)
        if have is None:
            wrong.append(f"{need.name} is missing")
        elif not need.specifier.contains(have, prereleases=True):
            wrong.append(f"{need.name} {have} is not {need.specifier}")
    if wrong:
        fix = f"{sys.executable} -m pip install --upgrade {OURS}, or make a new environment"
        return Finding("fail", "; ".join(wrong), fix)
    text = ", ".join(parts)
    if not required:
        fix = "pip install -e . in its folder, so that dsv41-train is found everywhere"
        return Finding("warn", f"{text}; {OURS} itself is not installed", fix)
    return Finding("ok", text)


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices(*, timeout_s: float) -> Finding:
    """Accelerators as torch sees them, asked in a process of its own: a broken driver can hang."""
    told = output_of([sys.executable, "-P", "-c", _DEVICES], timeout_s=timeout_s)
    cores = f"{os.cpu_count()} CPU cores, {memory_bytes() / 1e9:,.0f} GB of memory"
    if told is None:
        fix = "try python -c 'import torch; torch.cuda.init()' and see what it says"
        return Finding("fail", f"{cores}; torch does not start in {timeout_s:g} s", fix)
    seen = json.loads(told.splitlines()[-1])
    if seen["names"]:
        smallest = min(seen["memory"]) / 1e9
        kinds = ", ".join(sorted(set(seen["names"])))
        text = f"{len(seen['names'])} x {kinds}, {smallest:,.0f} GB each; {cores}"
        return Finding("ok", f"{text}; torch {seen['torch']} for CUDA {seen['cuda']}")
    if seen["cuda"] is not None and os.path.exists("/dev/nvidiactl"):
        fix = "see nvidia-smi: the driver may be older than this torch, or devices are hidden"
        return Finding("fail", f"{cores}; there is an accelerator, but torch sees none", fix)
    return Finding("ok", f"{cores}, no accelerator: small models train on the CPU")


def kernels() -> Finding:
    """The CPU's kernels, compiled now if they are not yet."""
    library, reason = built()
    if library is None:
        fix = "install gcc: a step on the CPU takes about two thirds of the time with it"
        return Finding("warn", f"{reason}; torch's own operators serve", fix)
    return Finding("ok", f"{library}, by {reason}")


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
