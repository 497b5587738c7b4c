"""One point of a sweep as a process of its own, which ends with the sweep.

Usage: python -P -m launcher.sweep.point RUN_DIR
"""

from __future__ import annotations

import sys

from launcher.guard import die_with_parent
from launcher.tools import main as tool

if __name__ == "__main__":
    die_with_parent()
    sys.exit(tool(["resume", *sys.argv[1:]]))
