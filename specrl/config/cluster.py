"""The resources of jobs, the cluster, and tracking."""

from __future__ import annotations

from typing import Literal

from specrl.config.base import PositiveFloat, PositiveInt, Section

LogLevel = Literal["debug", "info", "warning", "error"]


class StageResources(Section):
    """Overrides of `[resources]` for one stage; `Resources` describes the keys, and what is not given is inherited."""

    nodes: PositiveInt | None = None
    ranks_per_node: PositiveInt | None = None
    gpus_per_rank: Literal[0, 1] | None = None
    cpus_per_rank: PositiveInt | None = None
    memory_gib_per_rank: PositiveFloat | None = None
    gpu_memory_gib: PositiveFloat | None = None
    minutes: PositiveInt | None = None


class Resources(Section):
    """The resources that a stage's job asks for. A rank is one process, with one GPU or with CPU cores alone."""

    nodes: PositiveInt = 1
    """Number of nodes."""
    ranks_per_node: PositiveInt = 1
    """Number of ranks on each node."""
    gpus_per_rank: Literal[0, 1] = 0
    """Number of GPUs of each rank."""
    cpus_per_rank: PositiveInt = 2
    """Number of CPU cores of each rank."""
    memory_gib_per_rank: PositiveFloat = 8.0
    """Host memory of a rank, in GiB."""
    gpu_memory_gib: PositiveFloat = 80.0
    """Memory of one GPU, in GiB; the memory plan reads it, the scheduler does not."""
    minutes: PositiveInt = 60
    """The wall-clock limit of the job, in minutes."""

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes together."""
        return self.nodes * self.ranks_per_node


class ClusterConfig(Section):
    """The scheduler, its options, and the environment of its jobs."""

    backend: str = "local"
    """The scheduler that places the jobs: `local` (processes on this machine), `slurm`, or a class of your own as
    `package.module:Class`."""
    partition: str | None = None
    """Slurm's partition; the cluster's default if not given."""
    account: str | None = None
    """The account that Slurm charges."""
    qos: str | None = None
    """Slurm's quality of service."""
    constraint: str | None = None
    """The features that Slurm's nodes must have."""
    setup: tuple[str, ...] = ()
    """Shell lines that the job runs before Python starts, such as module loads and exports."""
    interface: str | None = None
    """The network interface for gloo and NCCL, such as `ib0`; they choose one if it is not given."""
    log_level: LogLevel = "info"
    """Lines below this level are left out of the ranks' logs. At `info`, a rank says when each phase of its work begins
    and how many seconds it took."""
    queue_minutes: PositiveInt = 24 * 60
    """How many minutes a job may wait in the queue before the flow gives up."""


class TrackingConfig(Section):
    """Where MLflow records the run."""

    uri: str | None = None
    """The URI of the MLflow tracking server; a SQLite file in the runs folder is used if it is not given."""
    experiment: str = "specrl"
    """The MLflow experiment in which the run appears."""
