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
    """Folders of the node that the ranks see, as `/SOURCE:/TARGET`. The runs folder and the folder that specrl is
    called from are always there, under their own names."""


class StageResources(Section):
    """Overrides of `[resources]` and `[cluster]` for one stage.

    `Resources` and `ClusterConfig` describe the keys, and what is not given is inherited.
    """

    backend: str | None = None
    """The scheduler of this stage's job. With `stage_resources.prepare.backend = "local"`, the model is downloaded
    where the flow runs, since compute nodes may have no network."""
    partition: SlurmName | None = None
    account: SlurmName | None = None
    qos: SlurmName | None = None
    constraint: Word | None = None
    sbatch: SbatchOptions = Field(default_factory=dict)
    """Options of sbatch beside those of `cluster.sbatch`; `false` takes one of those away."""
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
    memory_gib_per_rank: PositiveFloat = 10.0
    """Host memory of a rank, in GiB. The memory plan counts with it, and a job asks Slurm for it unless
    `cluster.request_memory` is false."""
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
    partition: SlurmName | None = None
    """Slurm's partition; the cluster's default if not given."""
    account: SlurmName | None = None
    """The account that Slurm charges."""
    qos: SlurmName | None = None
    """Slurm's quality of service."""
    constraint: Word | None = None
    """The features that Slurm's nodes must have."""
    request_memory: bool = True
    """Whether a job asks Slurm for the memory of its ranks (`--mem`). With `false`, for sites that refuse the option,
    it has what the partition gives by itself; `resources.memory_gib_per_rank` is then to say how much that is."""
    sbatch: SbatchOptions = Field(default_factory=dict)
    """Further options of sbatch by their long names, such as `reservation = "night"`, `exclusive = true` or
    `gres = "gpu:h100:8"`. Options that ask for GPUs replace `--gpus-per-node`, in the stages that have GPUs."""
    setup: tuple[SetupLine, ...] = ()
    """Shell lines that run before Python starts, in each job, such as module loads and exports. They are stored with
    the run, so no secret may be among them: `environment_file` is the place for those."""
    environment_file: PlainPath | None = None
    """A file of `NAME=VALUE` lines with variables of the ranks that are secret, such as `HF_TOKEN` or
    `MLFLOW_TRACKING_TOKEN`. Each rank reads it when it starts; what it says is stored nowhere, and no shell evaluates
    it. Nobody but you may read or write it (`chmod 600`), and the nodes must see it."""
    python: UserWord | None = None
    """The Python interpreter of a Slurm job's ranks; that of the flow if it is not given, and `python3` in a
    container."""
    container: ContainerConfig | None = None
    """The container in which a Slurm job's ranks run; none by default."""
    cache_dir: str | None = None
    """The folder for what vLLM, Triton, Inductor and the like compile, such as `$SCRATCH/cache`, with variables of the
    node's environment. By default it lies in `$SLURM_TMPDIR` or, where a node has none, in `/tmp`: hundreds of ranks
    that compile into a shared home folder would block each other."""
    interface: str | None = None
    """The network interface for gloo and NCCL, such as `ib0`; if it is not given, what `GLOO_SOCKET_IFNAME` and
    `NCCL_SOCKET_IFNAME` name in the job, or else the interface of the route to the job's other nodes."""
    network_gb_per_s: PositiveFloat = 40.0
    """The speed of the network between nodes for one rank, in GB/s and each direction, which the plan alone reads: by
    default that of an adapter of 400 Gb/s for each rank, at four fifths."""
    disk_gb_per_s: PositiveFloat = 5.0
    """The speed at which all nodes write together to the disk of `runs_dir`, in GB/s; only the plan reads it."""
    log_level: LogLevel = "info"
    """Lines below this level are left out of the ranks' logs. At `info`, a rank says when each phase of its work begins
    and how many seconds it took."""
    access: Literal["owner", "group"] = "owner"
    """Who may read what the run writes: its owner alone, or the members of the files' group as well. Nobody else may
    ever write to it."""
    trusted_groups: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$")], ...] = ()
    """Groups whose members may write to folders above the run's, as they can to a project's folder: names, or numbers.
    They could put a folder of theirs in its place. A run says so once, when it starts, of groups that are not named
    here; a folder above that belongs to another user is refused unless its group is."""
    ask_seconds: PositiveFloat = 30.0
    """How many seconds pass between two questions to Slurm. One question is about all of your jobs, and all flows on a
    host share its answer."""
    queue_minutes: PositiveInt = 24 * 60
    """How many minutes a job may wait in the queue before the flow gives up."""
    max_segments: PositiveInt | None = None
    """The most jobs that `specrl run` or `specrl resume` may use for one stage, each of which goes on where the one
    before ended; as many as it takes if not given."""
    max_attempts: PositiveInt = 3
    """After how many jobs in a row without a new step (or, in stages without steps, without a new file) a stage is
    given up. Jobs that the cluster took away (preempted, queued again by hand, lost with their node) count a tenth."""
    hang_minutes: PositiveFloat = 10.0
    """A rank that gives no sign of life for this long, and an RL step that takes this long and ten times its usual
    time, are taken to hang: all ranks write their Python stacks to their logs, and the job ends and is queued again."""
    start_minutes: PositiveFloat = 60.0
    """The same limit for what has no usual time yet: the start of the ranks, loading and compiling, the first step of
    each job, and what follows the last step."""


PASSWORD = re.compile(r"\b(?:ssl)?(?:password|passwd|pwd)\s*=", re.IGNORECASE)
"""What databases call a password in the query of a URI, and in a connection string of ODBC within one."""
URI_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
"""What a tracking URI may begin with; a database's driver may follow, as in `mysql+pymysql`."""


def checked_uri(uri: str) -> str:
    """A tracking URI without a user or a password; the path of SQLite's file is made absolute."""
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
    (`MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`, or `MLFLOW_TRACKING_TOKEN`). `sqlite:///FILE` is a file,
    from the folder in which the command runs; one in the runs folder is used if nothing is given."""
    experiment: Annotated[str, Field(min_length=1, max_length=500)] = "specrl"
    """The MLflow experiment in which the run appears; the last part of its path is the W&B project."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Whether metrics go to Weights & Biases, too: while they are measured, or into files in `wandb/` of the run's
    folder, for `wandb beta sync`. `WANDB_API_KEY` or `wandb login` give the key, `WANDB_ENTITY` names the team."""
    max_model_gib: PositiveFloat = 4.0
    """The size in GiB up to which the registered policy and drafter are uploaded whole. Of larger ones MLflow gets all
    files but the weights, and a tag that says where those lie."""
