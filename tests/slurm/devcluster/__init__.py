"""A real Slurm of N virtual nodes on one machine: munge, MariaDB, slurmdbd, slurmctld, and one slurmd per node.

It is for development and tests, and has accounting, preemption and requeue. It needs no systemd and does not touch the
machine's own Slurm: all its files are in one folder, and it listens on the loopback interface only.
"""

from __future__ import annotations

from tests.slurm.devcluster.cluster import DevCluster, Status, default_root
from tests.slurm.devcluster.daemons import DevClusterError

__all__ = ["DevCluster", "DevClusterError", "Status", "default_root"]
