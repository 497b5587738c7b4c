"""torchrun's elastic agent as a process that ends with the one that started it.

Usage: python -P -m launcher.backends.agent TORCHRUN-ARGUMENTS
"""

from __future__ import annotations

import os
import sys

from launcher.guard import as_parent, die_with_parent


def main() -> None:
    die_with_parent()
    os.environ.update(as_parent())  # which the ranks inherit
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
