"""The configuration files of the development cluster, as text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CPUS_PER_NODE = 8
MEMORY_MIB_PER_NODE = 65536
GPUS_PER_NODE = 2
"""The resources of a virtual node. They may be more than the machine has, so that the requests of small jobs fit."""


@dataclass(frozen=True)
class Layout:
    """Where the cluster's files are, and on which loopback address and ports its daemons listen."""

    root: Path
    user: str
    nodes: int
    address: str
    dbd_port: int
    ctld_port: int
    node_ports: tuple[int, ...]

    @property
    def munge_socket(self) -> Path:
        """The socket by which Slurm's programs talk to munged."""
        return self.root / "munge" / "socket"

    @property
    def database_socket(self) -> Path:
        """The socket by which slurmdbd talks to MariaDB."""
        return self.root / "run" / "mariadb.sock"

    @property
    def node_names(self) -> list[str]:
        """The names of the virtual nodes."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    def pid_file(self, daemon: str) -> Path:
        """Return the file to which a daemon writes its process id."""
        return self.root / "run" / f"{daemon}.pid"


def files(layout: Layout) -> dict[str, str]:
    """Return the contents of the configuration files by their names under `etc/`."""
    return {
        "slurm.conf": slurm_conf(layout),
        "slurmdbd.conf": slurmdbd_conf(layout),
        "gres.conf": gres_conf(layout),
        "cgroup.conf": "CgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n",
        "task_prolog.sh": TASK_PROLOG,
    }


# srun adds lines `export NAME=value` that the task prolog prints to the task's environment. The nodes' names do not
# resolve, and need not: slurm/slurm_backend.py joins the ranks over the loopback interface when it sees this variable.
TASK_PROLOG = "#!/bin/sh\necho export SPECRL_ONE_HOST=1\n"


def slurmdbd_conf(layout: Layout) -> str:
    root = layout.root
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
DbdHost=localhost
DbdAddr={layout.address}
DbdPort={layout.dbd_port}
CommunicationParameters=NoInAddrAny
SlurmUser={layout.user}
PidFile={layout.pid_file("slurmdbd")}
LogFile={root}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageUser={layout.user}
StorageLoc=slurm_acct_db
"""


def gres_conf(layout: Layout) -> str:
    devices = f"{layout.root}/dev/gpu[0-{GPUS_PER_NODE - 1}]"
    return f"AutoDetect=off\nNodeName=node[1-{layout.nodes}] Name=gpu Type=fake File={devices}\n"


def slurm_conf(layout: Layout) -> str:
    root, ports = layout.root, ",".join(str(port) for port in layout.node_ports)
    return f"""\
ClusterName=specrl
SlurmctldHost=localhost({layout.address})
SlurmctldPort={layout.ctld_port}
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket},cred_expire=5
CredType=cred/munge
SlurmUser={layout.user}
SlurmdUser={layout.user}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={layout.pid_file("slurmctld")}
SlurmdPidFile={layout.pid_file("slurmd-%n")}
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
TaskProlog={root}/etc/task_prolog.sh
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
EnforcePartLimits=ALL
SlurmdTimeout=15
KillWait=5
MinJobAge=300
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={layout.address}
AccountingStoragePort={layout.dbd_port}
AccountingStoragePass={layout.munge_socket}
AccountingStorageTRES=gres/gpu
GresTypes=gpu
NodeName=node[1-{layout.nodes}] NodeHostname=localhost NodeAddr={layout.address} Port={ports} \\
    CPUs={CPUS_PER_NODE} RealMemory={MEMORY_MIB_PER_NODE} Gres=gpu:fake:{GPUS_PER_NODE} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=low   Nodes=ALL PriorityTier=1 GraceTime=10 PreemptMode=REQUEUE
PartitionName=spot  Nodes=ALL PriorityTier=1 GraceTime=0 PreemptMode=REQUEUE
PartitionName=high  Nodes=ALL PriorityTier=100 PreemptMode=OFF
"""
