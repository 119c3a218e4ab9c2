"""The code that a job runs, and the environment variables of its processes: import paths, threads, devices, networks.

The code is a copy in the run's folder, so that editing sources does not change a job that waits.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slurm.backend import Backend, StageRequest
from specrl.config import ClusterConfig
from specrl.keys import files_digest

PACKAGES = ("specrl", "slurm")
"""The packages that run in a job. They lie in one folder, as in a checkout."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""The variables of ranks on one machine, which communicate over the loopback interface, whatever the host is called."""


def snapshot_code(run_dir: Path) -> Path:
    """Copy the packages to `run_dir/code/DIGEST`, unless they are there already, and return that folder."""
    root = Path(__file__).parents[1]
    target = run_dir / "code" / files_digest(_files(root))
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".copying-", dir=target.parent))
    temporary.chmod(0o755)
    try:
        for package in PACKAGES:
            shutil.copytree(root / package, temporary / package, ignore=shutil.ignore_patterns("__pycache__"))
        temporary.rename(target)
    except OSError:
        if not target.is_dir():  # else another flow was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in (root / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, str(path.relative_to(root))


def job_environment(code: Path) -> dict[str, str]:
    """Return the variables that a job's processes need before Python starts.

    They make Python import the run's copy of the code before anything else. The folder of the submission comes last on
    the path, for the user's own functions; `PYTHONSAFEPATH` keeps Python from putting it first.

    Args:
        code: The folder with the copy of the packages.
    """
    places = [str(code), os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
    return {
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "PYTHONSAFEPATH": "1",
        "PYTHONFAULTHANDLER": "1",
        "DO_NOT_TRACK": "true",
    }


def prepare_rank(request: StageRequest, backend: Backend) -> None:
    """Set the variables that torch and OpenMP read once, when they are loaded. Call this before importing either.

    Every rank sees all GPUs of its node and takes the one of its LOCAL_RANK, as NCCL wants it.
    """
    resources = request.resources
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(resources.cpus_per_rank)), TOKENIZERS_PARALLELISM="false")
    if not resources.gpus_per_rank:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(backend.rank_environment(request))


def named_interface(cluster: ClusterConfig) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use `cluster.interface`; none where they may choose one."""
    if cluster.interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": cluster.interface, "NCCL_SOCKET_IFNAME": cluster.interface}
