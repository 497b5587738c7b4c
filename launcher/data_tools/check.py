"""`dsv41 data check`: every line that cannot be used, on standard output; the counts on stderr."""

from __future__ import annotations

import sys

from data.cache.check import Check
from data.cache.parallel import usable_cores
from data.cache.prepare import recipes
from launcher.data_tools.prepare import told
from launcher.data_tools.view import SourceView
from launcher.run_config import RunConfig
from trainer.exit_codes import ExitCode


def run(config: RunConfig) -> int:
    """Look at all documents of all sources. 65 when anything is found, else 0."""
    data, found = config.data, 0
    with SourceView("checking") as view, told():
        for recipe in recipes(data, config.model, say=view.say):
            check = Check(
                recipe,
                pack_length=data.pack_length,
                processes=data.processes or usable_cores(),
            )
            lines = 0
            for line in check.lines(view):
                lines += 1
                print(line, flush=True)
            found += lines
            view.say(
                f"{recipe.name}: {check.documents:,} documents can be used, "
                f"{check.duplicates:,} of them duplicates; {lines:,} line(s) to look at"
            )
    if not found:
        return ExitCode.DONE
    print("dsv41 data check: correct or remove the lines above.", file=sys.stderr)
    return ExitCode.BAD_DATA
