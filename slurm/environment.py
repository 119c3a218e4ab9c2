"""The code that a job runs, and the environment variables of its processes: import paths, threads, devices, networks.

The code is a copy in the run's folder, so that editing sources does not affect queued jobs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import stat
import tempfile
from pathlib import Path

from slurm.backend import Backend, StageRequest
from slurm.trust import DistrustError, check_code, sources_digest
from specrl.checks.gpu import own_cuda_home
from specrl.config import Config, ConfigError, Resources
from specrl.config.text import is_control
from specrl.lineage.record import CODE_DIR
from specrl.processes import OF_CLUSTER, OF_RANKS, SLURMS, node_folder

CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
}
"""The variables for the location of compiled code, and the names of their folders in `cluster.cache_dir`."""
PACKAGES = ("flows", "tasks", "slurm", "specrl")  # what a run needs to continue; in one folder, as in a checkout
ROOT = Path(__file__).parents[1]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
WAITING = {"GOMP_SPINCOUNT": "1000"}
"""By default, waiting OpenMP threads spin for long; if another process uses one of the cores, every matrix product then
waits for the scheduler. On idle cores, a short spin is as good."""
FULL_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
"""The variables that make NVIDIA's libraries and Triton kernels multiply float32 numbers in float32 rather than TF32,
which keeps only 10 mantissa bits. Transformer Engine and vLLM's attention would choose TF32."""
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""The variables of ranks on one machine, which communicate over the loopback interface whatever the host's name."""
OF_JOBS = (*SLURMS, "SLURMD_", "SUBMITIT_", "PREFECT_")  # prefixes of the variables of jobs and flows
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MOST_BYTES = 2**20


def present_code() -> str:
    """The digest of the sources that this process imports, which names their snapshot."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return sources_digest(ROOT, (str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts))


def snapshot_code(run_dir: Path) -> Path:
    """Copy the packages to `run_dir/code/DIGEST`, unless they exist, for the flow that holds the run."""
    target = run_dir / CODE_DIR / present_code()
    with contextlib.suppress(DistrustError):
        check_code(target, target.name)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".copying-", dir=target.parent))
    temporary.chmod(0o755)
    try:
        for package in PACKAGES:
            shutil.copytree(ROOT / package, temporary / package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in temporary.rglob("*"):  # a copy keeps the mode of its source, which may be group-writable
            path.chmod(path.stat().st_mode & ~0o022)
        shutil.rmtree(target, ignore_errors=True)  # the existing copy was changed or is truncated
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def job_environment(code: Path, config: Config | None = None) -> dict[str, str]:
    """The variables that a job's processes need before Python starts, which then imports `code` before anything else.

    If the configuration names the user's own functions, the submission's folder comes last on the path. Otherwise it is
    left out, because others may be able to write to it.
    """
    own = str(Path.cwd()) if config is not None and config.import_paths else ""
    places = [str(code), os.environ.get("PYTHONPATH", ""), own]
    return {
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "PYTHONSAFEPATH": "1",  # or Python would put the submission's folder first
        "PYTHONDONTWRITEBYTECODE": "1",  # nothing may be added to the copy, whose digest is checked
        "PYTHONFAULTHANDLER": "1",
        "PYTHONHASHSEED": "0",  # generators choose from sets of strings, and all ranks must draw the same problems
        "DO_NOT_TRACK": "true",
    }


def inherited() -> dict[str, str]:
    """The variables that a job inherits: neither those of this process's own job nor Prefect's password."""
    own = {name for name in os.environ if name.startswith(OF_JOBS) or name in OF_RANKS}
    return {name: value for name, value in os.environ.items() if name not in own or name in OF_CLUSTER}


def prepare_rank(request: StageRequest, backend: Backend) -> None:
    """Set the variables that torch and OpenMP read only when loaded. Call this before importing either."""
    resources, cluster = request.resources, request.key.cluster
    os.environ.update(read_environment_file(cluster.environment_file))  # first: what follows must stand
    dtype = request.context.config.model.dtype
    os.environ.update(process_variables(resources.cpus_per_rank, dtype, has_gpus=bool(resources.gpus_per_rank)))
    os.environ.update(backend.rank_environment(request))
    os.environ.update(device_variables(resources, os.environ.get("CUDA_VISIBLE_DEVICES")))
    for name, folder in cache_folders(cluster.cache_dir).items():
        os.environ.setdefault(name, folder)  # the site's or the user's choice has precedence


def device_variables(resources: Resources, visible: str | None) -> dict[str, str]:
    """The variables that give a rank its GPU among the `visible` ones (CUDA_VISIBLE_DEVICES).

    A rank that sees all GPUs of its node takes the one numbered LOCAL_RANK. If the scheduler binds GPUs to tasks, each
    rank sees only its own, which is number 0 for torch and vLLM; anything else is a ValueError.
    """
    if not resources.gpus_per_rank:
        return {"CUDA_VISIBLE_DEVICES": ""}
    if visible is None:
        return {}
    count = len(visible.split(",")) if visible else 0
    if count == 1:
        return {"LOCAL_RANK": "0"}
    if count < resources.ranks_per_node:
        raise ValueError(
            f"this rank sees {count} GPUs (CUDA_VISIBLE_DEVICES = {visible!r}) on a node with "
            f"{resources.ranks_per_node} ranks: it must see the GPUs of all of them, or its own alone "
            '(cluster.sbatch.gpus-per-task = 1, or cluster.sbatch.gpu-bind = "none")'
        )
    return {}


def process_variables(cores: int | str, dtype: str, *, has_gpus: bool) -> dict[str, str]:
    """The variables of a process that computes in `dtype`, which torch and OpenMP read only when loaded."""
    own = {**dict.fromkeys(THREAD_VARIABLES, str(cores)), **WAITING, "TOKENIZERS_PARALLELISM": "false"}
    if has_gpus and dtype == "float32":
        own |= FULL_FLOAT32
    if has_gpus and (home := own_cuda_home()) is not None:
        own["CUDA_HOME"] = home
    return own


def cache_folders(place: str | None) -> dict[str, str]:
    """The variables for the location of compiled code: below `place`, or in a node-local folder."""
    root = node_folder()
    if place:
        expanded = os.path.expandvars(place)
        if "$" in expanded:
            raise ValueError(f"cluster.cache_dir = {place!r}: a variable in it is not set on {os.uname().nodename}")
        root = Path(expanded).expanduser().absolute()
    folders = {name: root / folder for name, folder in CACHES.items()}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    return {name: str(folder) for name, folder in folders.items()}


def log_path(folder: Path, job_id: str, rank: int) -> Path:
    """The file to which a rank prints."""
    return folder / f"{job_id}_{rank}_log.out"


def read_environment_file(path: Path | None) -> dict[str, str]:
    """Read the variables in a file of `NAME=VALUE` lines, if there is one.

    Blank lines and those that begin with # are ignored.
    A value is the literal rest of its line: nothing is expanded, and quotes belong to it. No error message reveals it.
    """
    variables: dict[str, str] = {}
    if path is None:
        return variables
    for number, line in enumerate(_private_text(path).split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.partition("=")
        if not separator or not VARIABLE.fullmatch(name) or any(is_control(character) for character in value):
            raise _refusal(path, f": line {number} must be NAME=VALUE, without export or control characters")
        variables[name] = value
    return variables


def _private_text(path: Path) -> str:
    try:
        # O_NONBLOCK, so as not to wait for the other end of a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            _check_private(path, os.fstat(file.fileno()))  # of the open file, which cannot be replaced
            return file.read(MOST_BYTES).decode()
    except OSError as error:
        raise _refusal(path, f" cannot be read on {os.uname().nodename}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refusal(path, " must be UTF-8 text") from error


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path, " must be a file")
    if status.st_uid != os.geteuid():
        raise _refusal(path, f" belongs to user {status.st_uid}: it must be your own")
    if status.st_mode & 0o077:
        mode, command = stat.S_IMODE(status.st_mode), f"chmod 600 {shlex.quote(str(path))}"
        raise _refusal(path, f" is open to others (mode {mode:o}): run {command}, and replace the secrets in it")


def _refusal(path: Path, words: str) -> ConfigError:
    return ConfigError(f"cluster.environment_file = {str(path)!r}{words}")
