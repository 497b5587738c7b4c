"""torchrun's elastic agent as a process that ends with the one that started it.

Usage: python -P -m launcher.backends.agent TORCHRUN-ARGUMENTS
"""

from __future__ import annotations

import os
import sys

from launcher.guard import die_with_parent


def main() -> None:
    die_with_parent(os.getppid())
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
