"""The resources of jobs, the cluster, and tracking."""

from __future__ import annotations

from typing import Literal

from specrl.config.base import PositiveFloat, PositiveInt, Section

LogLevel = Literal["debug", "info", "warning", "error"]


class StageResources(Section):
    """Overrides of `[resources]` for one stage. What is not given is inherited."""

    nodes: PositiveInt | None = None
    ranks_per_node: PositiveInt | None = None
    gpus_per_rank: Literal[0, 1] | None = None
    cpus_per_rank: PositiveInt | None = None
    memory_gib_per_rank: PositiveFloat | None = None
    gpu_memory_gib: PositiveFloat | None = None
    minutes: PositiveInt | None = None


class Resources(Section):
    """What a stage's job asks for. A rank is one process: one GPU, or one slot of CPUs."""

    nodes: PositiveInt = 1
    ranks_per_node: PositiveInt = 1
    gpus_per_rank: Literal[0, 1] = 0
    cpus_per_rank: PositiveInt = 2
    memory_gib_per_rank: PositiveFloat = 8.0
    """Host memory of a rank, in GiB."""
    gpu_memory_gib: PositiveFloat = 80.0
    """Memory of one GPU, in GiB. Only the plan reads it."""
    minutes: PositiveInt = 60
    """The wall-clock limit of the job, in minutes."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class ClusterConfig(Section):
    backend: str = "local"
    """The scheduler that places the jobs: `local` (processes on this machine), `slurm`, or a class of your own as
    `package.module:Class`."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    setup: tuple[str, ...] = ()
    """Shell lines that the job runs before Python starts, such as module loads and exports."""
    interface: str | None = None
    """The network interface for gloo and NCCL, such as `ib0`. Without it they choose."""
    log_level: LogLevel = "info"
    """Lines below this level are left out of the ranks' logs. At `info`, a rank says when each phase of its work begins
    and how many seconds it took."""
    queue_minutes: PositiveInt = 24 * 60
    """How many minutes a job may wait in the queue before the flow gives up."""


class TrackingConfig(Section):
    uri: str | None = None
    """The MLflow tracking server. Without it, a sqlite file in the runs folder is used."""
    experiment: str = "specrl"
