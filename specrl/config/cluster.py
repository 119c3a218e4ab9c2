"""The resources of jobs, the cluster, and tracking."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote_plus, urlsplit

from pydantic import AfterValidator, Field

from specrl.config.base import PositiveFloat, PositiveInt, Section
from specrl.config.sbatch import SbatchOptions
from specrl.config.text import PlainPath, SetupLine, SlurmName, UserPlace, UserWord, Word, expanded, redacted, shown

LogLevel = Literal["debug", "info", "warning", "error"]


def _mount(text: str) -> str:
    parts = text.split(":")
    if len(parts) > 3 or not all(part.startswith("/") for part in parts[:2]) or "," in text:
        raise ValueError(f"{text!r} must be /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:FLAGS, without commas")
    return text


class ContainerConfig(Section):
    """The container in which each rank of a Slurm job runs. `cluster.setup` runs before it, on the node itself."""

    kind: Literal["pyxis", "apptainer"]
    """`pyxis` uses `srun --container-image`, for which Slurm needs the plugin of that name; `apptainer` starts each
    rank with `apptainer exec`."""
    image: UserWord
    """The image, as the runtime names it: a file on a shared file system, or an address such as `docker://...`."""
    mounts: tuple[Annotated[UserPlace, AfterValidator(_mount)], ...] = ()
    """Folders of the node that the ranks see, as `/SOURCE:/TARGET`. The runs folder and the folder from which specrl is
    called are always mounted, under their own names."""


class StageResources(Section):
    """For one stage: each key overrides the key of the same name in `[resources]` or `[cluster]`."""

    backend: str | None = None
    """The scheduler of this stage's job. With `stage_resources.prepare.backend = "local"`, the model is downloaded
    where the flow runs, since compute nodes may have no network."""
    partition: SlurmName | None = None
    account: SlurmName | None = None
    qos: SlurmName | None = None
    constraint: Word | None = None
    sbatch: SbatchOptions = Field(default_factory=dict)
    """Options of sbatch in addition to those of `cluster.sbatch`; `false` removes one of those."""
    nodes: PositiveInt | None = None
    ranks_per_node: PositiveInt | None = None
    gpus_per_rank: Literal[0, 1] | None = None
    cpus_per_rank: PositiveInt | None = None
    memory_gib_per_rank: PositiveFloat | None = None
    gpu_memory_gib: PositiveFloat | None = None
    minutes: PositiveInt | None = None


class Resources(Section):
    """The resources of a stage's job. A rank is one process, with one GPU or with only CPU cores."""

    nodes: PositiveInt = 1
    """Number of nodes."""
    ranks_per_node: PositiveInt = 1
    """Number of ranks on each node."""
    gpus_per_rank: Literal[0, 1] = 0
    """Number of GPUs of each rank."""
    cpus_per_rank: PositiveInt = 2
    """Number of CPU cores of each rank."""
    memory_gib_per_rank: PositiveFloat = 10.0
    """Host memory of a rank, in GiB. The memory plan relies on it, and a job requests it from Slurm unless
    `cluster.request_memory` is false."""
    gpu_memory_gib: PositiveFloat = 80.0
    """Memory of one GPU, in GiB. Only the memory plan uses it, not the scheduler."""
    minutes: PositiveInt = 60
    """The wall-clock limit of the job, in minutes."""

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes together."""
        return self.nodes * self.ranks_per_node


class ClusterConfig(Section):
    """The scheduler, its options, and the environment of its jobs."""

    backend: str = "local"
    """The scheduler of the jobs: `local` (processes on this machine), `slurm`, or a class of your own as
    `package.module:Class`."""
    partition: SlurmName | None = None
    """Slurm's partition; the cluster's default if not given."""
    account: SlurmName | None = None
    """The account that Slurm charges."""
    qos: SlurmName | None = None
    """Slurm's quality of service."""
    constraint: Word | None = None
    """The node features that Slurm requires."""
    request_memory: bool = True
    """Whether a job requests the memory of its ranks from Slurm (`--mem`). With `false`, for sites that refuse the
    option, it gets what the partition gives by default, which `resources.memory_gib_per_rank` should then state."""
    sbatch: SbatchOptions = Field(default_factory=dict)
    """Further options of sbatch by their long names, such as `reservation = "night"`, `exclusive = true` or
    `gres = "gpu:h100:8"`. Options that ask for GPUs replace `--gpus-per-node`, in the stages that have GPUs."""
    setup: tuple[SetupLine, ...] = ()
    """Shell lines that run in each job before Python starts, such as module loads and exports. They are stored with the
    run, so put no secrets there, but into `environment_file`."""
    environment_file: PlainPath | None = None
    """A file of `NAME=VALUE` lines with secret variables of the ranks, such as `HF_TOKEN` or `MLFLOW_TRACKING_TOKEN`.
    Each rank reads it when it starts; its contents are not stored, and no shell evaluates them. Only you may read or
    write it (`chmod 600`), and the nodes must see it."""
    python: UserWord | None = None
    """The Python interpreter of a Slurm job's ranks; by default that of the flow, and `python3` in a container."""
    container: ContainerConfig | None = None
    """The container in which a Slurm job's ranks run; none by default."""
    cache_dir: str | None = None
    """The folder for what vLLM, Triton, Inductor and others compile, such as `$SCRATCH/cache`; variables are those of
    the node. By default it is in `$SLURM_TMPDIR` or, if a node has none, in `/tmp`, because hundreds of ranks that
    compile into a shared home folder would block each other."""
    interface: str | None = None
    """The network interface for gloo and NCCL, such as `ib0`; by default the one that `GLOO_SOCKET_IFNAME` and
    `NCCL_SOCKET_IFNAME` name in the job, or else the one that routes to the job's other nodes."""
    network_gb_per_s: PositiveFloat = 40.0
    """The network bandwidth of one rank between nodes, in GB/s in each direction. Only the plan uses it; the default is
    four fifths of a 400 Gb/s adapter per rank."""
    disk_gb_per_s: PositiveFloat = 5.0
    """The speed at which all nodes together write to the disk of `runs_dir`, in GB/s; only the plan uses it."""
    log_level: LogLevel = "info"
    """Lines below this level are left out of the ranks' logs. At `info`, a rank logs when each phase of its work begins
    and how many seconds it took."""
    access: Literal["owner", "group"] = "owner"
    """Who may read what the run writes: only its owner, or also the members of the files' group. Nobody else may ever
    write to it."""
    trusted_groups: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$")], ...] = ()
    """Groups, by name or number, whose members may write to folders above the run's, such as a project's folder. They
    could put a folder of their own in its place. For groups that are not listed here, a run says so once, when it
    starts; a folder above that belongs to another user is refused unless its group is listed."""
    ask_seconds: PositiveFloat = 30.0
    """Seconds between two queries to Slurm. One query covers all of your jobs, and all flows on a host share its
    answer."""
    queue_minutes: PositiveInt = 24 * 60
    """How many minutes a job may wait in the queue before the flow gives up."""
    max_segments: PositiveInt | None = None
    """The most jobs that `specrl run` or `specrl resume` may use for one stage, each of which continues where the one
    before ended; by default as many as it takes."""
    max_attempts: PositiveInt = 3
    """A stage is given up after this many jobs in a row without a new step (or, in stages without steps, without a new
    file). Jobs that the cluster took away (preempted, requeued by hand, lost with their node) count as a tenth."""
    hang_minutes: PositiveFloat = 10.0
    """A rank hangs if it gives no sign of life for this long, or if an RL step takes this long and also ten times its
    usual time. Then all ranks write their Python stacks to their logs, and the job ends and is queued again."""
    start_minutes: PositiveFloat = 60.0
    """The same limit for phases without a usual time: the start of the ranks, loading and compiling, the first step of
    each job, and what follows the last step."""


PASSWORD = re.compile(r"\b(?:ssl)?(?:password|passwd|pwd)\s*=", re.IGNORECASE)
"""Names of a password in a URI's query, and in an ODBC connection string inside it."""
URI_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
"""The schemes of a tracking URI; a database's driver may follow, as in `mysql+pymysql`."""


def checked_uri(uri: str) -> str:
    """Check that a tracking URI contains no credentials, and make the path of an SQLite file absolute."""
    scheme, has_scheme, rest = uri.partition("://")
    is_file = scheme.partition("+")[0] == "sqlite"
    if uri != "databricks" and not uri.startswith("/"):
        is_known = bool(has_scheme) and scheme.partition("+")[0] in URI_SCHEMES
        if not is_known or (is_file and (rest[:1] != "/" or rest in ("/", "/:memory:"))):
            raise ValueError(
                f"{shown(redacted(uri))}: allowed: http://HOST:PORT, https://..., sqlite:///FILE, "
                "postgresql://..., mysql://..., mssql://..., databricks"
            )
    if is_file:
        uri = f"{scheme}:///{Path(str(expanded(rest[1:]))).absolute()}"
    parts = urlsplit(uri)
    is_server = parts.scheme in ("http", "https")
    named = parts.password is not None or (is_server and parts.username is not None)
    if named or PASSWORD.search(unquote_plus(parts.query)):
        given = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        raise ValueError(
            "a user or password in it would be stored with the run: leave it out, and give it "
            f"in the environment of the run ({given if is_server else 'such as PGPASSWORD or a ~/.pgpass file'})"
        )
    return uri


class TrackingConfig(Section):
    """Where MLflow, and Weights & Biases if it is asked to, record the run."""

    uri: Annotated[str, AfterValidator(checked_uri)] | None = None
    """The URI of the MLflow tracking server, without a password: credentials are given in the environment
    (`MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`, or `MLFLOW_TRACKING_TOKEN`). `sqlite:///FILE` is
    relative to the folder in which the command runs; by default such a file in the runs folder is used."""
    experiment: Annotated[str, Field(min_length=1, max_length=500)] = "specrl"
    """The MLflow experiment in which the run appears; the last part of its path is the W&B project."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Whether metrics also go to Weights & Biases: `online` while they are measured, or `offline` into files in
    `wandb/` of the run's folder, for `wandb beta sync`. `WANDB_API_KEY` or `wandb login` provide the key,
    `WANDB_ENTITY` names the team."""
    max_model_gib: PositiveFloat = 4.0
    """The size in GiB up to which the registered policy and drafter are uploaded whole. For larger ones, MLflow gets
    all files except the weights, and a tag that says where they are."""
