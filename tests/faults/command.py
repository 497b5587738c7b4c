"""The command of a user whose configuration is composed already: python command.py CONFIG ID."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from launcher import freeze
from launcher.submit import submit

if __name__ == "__main__":
    config = replace(freeze.load(Path(sys.argv[1])), id=sys.argv[2], resume="auto")
    sys.exit(submit(config, overrides=[]).code)
