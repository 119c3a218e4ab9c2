"""A real Slurm of N virtual nodes on one machine: munge, MariaDB, slurmdbd, slurmctld, one slurmd per node.

For development and tests, with accounting, preemption and requeue, without systemd and without touching the
machine's own Slurm: everything lives under one folder and listens on the loopback interface alone.
"""

from __future__ import annotations

from slurm.devcluster.cluster import DevCluster, Status, default_root
from slurm.devcluster.daemons import DevClusterError

__all__ = ["DevCluster", "DevClusterError", "Status", "default_root"]
