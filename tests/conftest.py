"""What tests of several folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.slurm.devcluster import DevCluster
from tests.slurm.devcluster.daemons import missing_programs

settings.load_profile("ci")  # everywhere: the same examples each time, and as long for each as it takes
OTHERS = ("PREFECT_", "MLFLOW_", "SLURM_", "SBATCH_", "SUBMITIT_", "SPECRL_", "VLLM_", "FORCE_COLOR", "PYTHONWARNINGS")
"""How variables begin that say what a user, a job or a terminal wants of the programs that tests start."""
for variable in [name for name in os.environ if name.startswith(OTHERS)]:
    del os.environ[variable]
os.environ.update(COLUMNS="80", LC_ALL="C.UTF-8", NO_PROXY="127.0.0.1,localhost", no_proxy="127.0.0.1,localhost")
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # jobs import stages of the tests, and the run's code first
os.environ["OMP_NUM_THREADS"] = "1"  # two workers on two cores, and ranks of their own: more threads crawl


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "how many tokens at least of each kind of drafter are compared with plain decoding (default: 20000)"
    parser.addoption("--exactness-tokens", type=int, default=20_000, metavar="N", help=text)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that need the cluster take longest: with two workers, which take file after file, they must come first."""
    with_cluster = {item.path for item in items if "devcluster" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in with_cluster)


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """Each test begins with a common umask, whatever a command that ran in this process before has set."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def num_tokens(pytestconfig: pytest.Config) -> int:
    """How many tokens at least of each kind of drafter are compared with plain decoding."""
    found: int = pytestconfig.getoption("exactness_tokens")
    return found


@pytest.fixture(scope="session")
def devcluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """A real Slurm with two virtual nodes; the tests' processes talk to it."""
    if missing_programs() and os.environ.get("CI") != "true":
        pytest.skip("Slurm is not installed; `python -m tests.slurm.devcluster up` names the packages")
    cluster = DevCluster(tmp_path_factory.mktemp("devcluster"))
    cluster.up(2)
    os.environ["SLURM_CONF"] = str(cluster.slurm_conf)
    yield cluster
    del os.environ["SLURM_CONF"]
    cluster.down()
