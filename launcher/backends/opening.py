"""The backend that a configuration names; each is imported where it is used."""

from __future__ import annotations

from collections.abc import Callable

from launcher.backends.protocol import Backend
from launcher.run_config import RunConfig


def backend_of(config: RunConfig, *, say: Callable[[str], None]) -> Backend:
    """The backend of config.launcher.kind. A `local` run has none: it is its own process."""
    if config.launcher.kind == "ray":
        from launcher.backends.ray.backend import Ray

        return Ray(say=say)
    assert config.launcher.kind == "torchrun", config.launcher.kind
    from launcher.backends.torchrun import Torchrun

    return Torchrun(config.launcher.torchrun, say=say)
