"""A real Slurm of virtual nodes on this machine: `python -m tests.slurm.devcluster up [NODES] | down | status`."""

from __future__ import annotations

import sys

from tests.slurm.devcluster import DevCluster, DevClusterError


def main(command: str = "status", nodes: str = "2") -> None:
    cluster = DevCluster()
    if command == "up":
        cluster.up(int(nodes))
        print(f"export SLURM_CONF={cluster.slurm_conf}")
    elif command == "down":
        cluster.down()
    for name, alive in cluster.status().daemons.items():
        print(f"{name:12} {'up' if alive else 'down'} {cluster.status().nodes.get(name.removeprefix('slurmd-'), '')}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except DevClusterError as error:
        sys.exit(str(error))
