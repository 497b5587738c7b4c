"""A Ray cluster of two nodes on this machine, for tests: python -P ray_nodes.py

Prints its address, then for each line on standard input loses the second node, adds another one,
and prints "lost". The end of standard input ends it. RAY_TMPDIR is to be a folder of its own.
"""

from __future__ import annotations

import os
import sys

from ray.cluster_utils import Cluster

from launcher.guard import die_with_parent


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    second = cluster.add_node(num_cpus=1)
    print(cluster.address, file=answers, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(second, allow_graceful=False)
        print("lost", file=answers, flush=True)
        second = cluster.add_node(num_cpus=1)
    cluster.shutdown()


if __name__ == "__main__":
    main()
