"""The points of a sweep as configurations: what they share is composed once, not once a point."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict


class Composer:
    """Composes points of the sweep whose first configuration is `master`.

    Hydra takes a fifth of a second for a point, nearly all of it for files and groups. Points that
    choose the same groups and set the same names differ only in the values: those are set in a copy
    of the first such point, as Hydra sets them. Anything else is left to Hydra.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        self._loader, self._master = loader, master
        self._parser = OverridesParser.create(config_loader=loader)
        self._groups = set(loader.list_groups(""))
        self._first: dict[tuple[str, ...], DictConfig | None] = {}  # None: only Hydra can

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of a point, the caller's own to change. Of `hydra` it may have no more
        than the launcher."""
        parsed = self._parser.parse_overrides(list(overrides))
        values = [override for override in parsed if not self._chooses(override)]
        key = tuple(
            f"{override.type.name} {override.key_or_group}" if override in values else line
            for override, line in zip(parsed, overrides, strict=True)
        )
        if key not in self._first:
            made = self._by_hydra(overrides)
            with open_dict(made):  # nothing else of it is asked for, and it is half of the whole
                made.hydra = {"launcher": made.hydra.launcher}
            alike = all(_only_sets(override) and _is_set(made, override) for override in values)
            self._first[key] = deepcopy(made) if alike else None
            return made
        first = self._first[key]
        if first is None or not all(map(_only_sets, values)):
            return self._by_hydra(overrides)
        made = deepcopy(first)
        for override in values:
            OmegaConf.update(made, override.key_or_group, override.value())
        return made

    def _by_hydra(self, overrides: Sequence[str]) -> DictConfig:
        return self._loader.load_sweep_config(self._master, list(overrides))

    def _chooses(self, override: Override) -> bool:
        """Whether it chooses an option of a group, which Hydra reads a file for."""
        name = override.key_or_group
        return (name in self._groups or "/" in name) and not isinstance(override.value(), dict)


def _only_sets(override: Override) -> bool:
    """Whether it gives one name one value, whatever that was before."""
    return (
        not override.is_delete()
        and override.package is None
        and override.key_or_group.partition(".")[0] != "hydra"
        and not isinstance(override.value(), dict)
    )


def _is_set(made: DictConfig, override: Override) -> bool:
    """Whether that value is what came of it."""
    name = override.key_or_group
    there = OmegaConf.select(made, name, throw_on_resolution_failure=False)
    return there == override.value()
