"""A Ray cluster of two nodes on this machine, for tests: python -P ray_nodes.py

Prints its address, then answers each line on standard input. lose: loses the second node, adds
another one, and prints "lost". list: prints, as JSON, the names of the actors that have one, and
how many placement groups there are. The end of standard input ends it. RAY_TMPDIR is to be a folder
of its own.
"""

from __future__ import annotations

import json
import os
import sys

import ray
from ray.cluster_utils import Cluster
from ray.util import list_named_actors, placement_group_table

from launcher.guard import die_with_parent


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    second = cluster.add_node(num_cpus=1)
    print(cluster.address, file=answers, flush=True)
    for line in sys.stdin:
        if line == "list\n":
            print(json.dumps(kept(str(cluster.address))), file=answers, flush=True)
            continue
        cluster.remove_node(second, allow_graceful=False)
        print("lost", file=answers, flush=True)
        second = cluster.add_node(num_cpus=1)
    cluster.shutdown()


def kept(address: str) -> tuple[list[str], int]:
    ray.init(address=address, log_to_driver=False)
    try:
        actors = [str(actor) for actor in list_named_actors(all_namespaces=True)]
        groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
        return actors, len(groups)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
