"""The doctor says what is there and how to fix what is not."""

from __future__ import annotations

import errno
import http.server
import json
import stat
import sysconfig
import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli import invoke
from flows.preflight import _shared_databases
from specrl.checks import Check, file_systems, gpu
from specrl.config import parse_config
from specrl.report import doctor

NOTHING_TO_FIX = ""


def fake_command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_every_finding_that_is_not_ok_says_how_to_fix_it(tmp_path: Path) -> None:
    found = doctor.checks(tmp_path / "runs")
    assert len({check.name for check in found}) == len(found)
    assert all(check.found for check in found)
    assert [check.name for check in found if (check.status == "ok") != (check.fix == NOTHING_TO_FIX)] == []


def test_this_environment_has_the_packages_it_needs() -> None:
    assert doctor.check_packages(doctor.LOCKS / "cpu.lock").status != "fail"
    assert doctor.check_torch(Path(sysconfig.get_path("purelib"))) == []


def test_a_login_node_checks_the_packages_of_its_environment_and_not_of_its_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_gpus", list)
    for torch, lock in (("2.13.0", "gpu.lock"), (None, "cpu.lock")):
        monkeypatch.setattr(gpu, "torch_for_gpus", lambda torch=torch: torch)
        (found,) = (check.found for check in doctor.checks(tmp_path / "runs") if check.name == "packages")
        assert f"of {lock}" in found


def test_a_package_that_is_missing_or_of_another_version_is_told(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.lock"
    lock.write_text("rich==1.0.0\nTyping_Extensions==4.0 ; python_version < '4'\n# rich==2\n")
    pins = doctor.read_pins(lock)
    assert pins == {"rich": "1.0.0", "typing-extensions": "4.0"}
    other = doctor.check_packages(lock)
    assert (other.status, other.fix) == ("warn", "make env LOCK=requirements/cpu.lock")
    assert "locked is 1.0.0" in other.found
    lock.write_text("no-such-package==1.0\nrich==1.0.0\n")
    missing = doctor.check_packages(lock)
    assert missing.status == "fail" and "no-such-package" in missing.found
    assert doctor.read_pins(tmp_path / "absent.lock") == {}


def test_developers_packages_may_be_missing_and_broken_or_hidden_ones_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("importlib_metadata")  # once imported it answers instead of Python's own, and raises earlier
    for place, version in (("first", "1.0"), ("second", "2.0")):
        own = tmp_path / place / f"needed-{version}.dist-info"
        own.mkdir(parents=True)
        (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: needed\nVersion: {version}\n")
    broken = {"empty": b"", "nameless": b"Metadata-Version: 2.1\nVersion: 1\n", "binary": b"\xff\xfe\0"}
    for name, metadata in broken.items():
        folder = tmp_path / "first" / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "RECORD").touch()
        if metadata:
            (folder / "METADATA").write_bytes(metadata)
    monkeypatch.setattr("sys.path", [str(tmp_path / "first"), str(tmp_path / "second")])
    lock = tmp_path / "cpu.lock"
    lock.write_text("needed==1.0\n")
    assert doctor.check_packages(lock).status == "ok"
    lock.write_text("needed==1.0\nruff==0.1\n")
    without = doctor.check_packages(lock)
    assert without.status == "warn" and without.found.endswith("others are installed: ruff (missing), locked is 0.1")


def test_all_that_developers_install_is_known_to_the_doctor() -> None:
    lines = (doctor.LOCKS / "dev.in").read_text().split()
    assert set(lines) <= set(doctor.DEVELOPERS) <= set(doctor.read_pins(doctor.LOCKS / "cpu.lock"))


def test_a_machine_without_slurm_is_told_which_packages_bring_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "SYSTEM_PATHS", str(tmp_path))
    [slurm] = doctor.check_slurm()
    assert slurm.status == "warn"
    assert "apt-get install" in slurm.fix


def test_a_partial_slurm_names_the_missing_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "SYSTEM_PATHS", str(tmp_path))
    for name in doctor.CLIENT[1:]:
        fake_command(tmp_path, name, "exit 1")
    [partial] = doctor.check_slurm()
    assert partial.found == "missing sbatch"
    fake_command(tmp_path, "sbatch", "exit 1")
    assert [check.status for check in doctor.check_slurm()] == ["ok", "warn", "warn", "warn"]
    for name in ("sinfo", "sacct", "munge"):
        fake_command(tmp_path, name, "echo '2 debug*'")
    answers = doctor.check_slurm()
    assert [check.status for check in answers] == ["ok"] * 4
    assert "2 debug*" in answers[-1].found


def test_mlflow_is_asked_where_it_is(tmp_path: Path) -> None:
    answered = doctor.check_mlflow(tmp_path, None)
    assert (answered.status, answered.found) == ("ok", f"sqlite:///{tmp_path}/mlflow.db")
    assert not (tmp_path / "mlflow.db").exists()
    (tmp_path / "mlflow.db").write_text("not a database, but long enough to be read as the header of one" * 4)
    damaged = doctor.check_mlflow(tmp_path, None)
    assert (damaged.status, damaged.fix) == ("fail", "name another file")


def test_a_store_that_cannot_be_used_comes_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+nodriver://host/mlflow")
    told = doctor.check_mlflow(tmp_path, None)
    assert told.found.startswith("MLFLOW_TRACKING_URI = ") and told.fix == "correct it, or unset it"


def test_an_mlflow_server_that_is_away_fails_with_its_address() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    uri = f"http://127.0.0.1:{server.server_address[1]}"
    server.server_close()
    away = doctor.check_mlflow(Path("runs"), uri)
    assert away.status == "fail"
    assert uri in away.found


def test_the_doctor_asks_the_mlflow_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mine.db")
    invoke(["doctor", "--json", "--runs-dir", str(tmp_path)])
    found = {check["name"]: check["found"] for check in json.loads(capsys.readouterr().out)}
    assert found["MLflow"] == f"sqlite:///{tmp_path}/mine.db"


def test_an_mlflow_server_that_answers_is_ok() -> None:
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Healthy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    answered = doctor.check_mlflow(Path("runs"), f"http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    thread.join()
    server.server_close()
    assert answered.status == "ok"


def test_a_prefect_home_that_cannot_be_made_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "file" / "home"))
    assert doctor.check_prefect_home(tmp_path).status == "fail"
    monkeypatch.delenv("PREFECT_HOME")
    assert doctor.check_prefect_home(tmp_path).found == str(tmp_path / ".prefect")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_table_is_plain_when_piped_and_only_failures_set_the_exit_code() -> None:
    found = [Check("a", "ok", "1"), Check("b", "warn", "[2]", "make [b]")]
    text = StringIO()
    doctor.render(found, Console(file=text))
    assert "\x1b" not in text.getvalue()
    assert "b      warn    [2]" in text.getvalue()
    assert "b: make [b]" in text.getvalue()
    assert doctor.exit_code(found) == 0
    assert doctor.exit_code([*found, Check("c", "fail", "3", "fix")]) == 1


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of mounts, with one for the folder `a b`."""
    table, folder = tmp_path / "mountinfo", tmp_path / "a b"
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")

    def mount(kind: str) -> None:
        table.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / {point} rw shared:1 - {kind} host:/x rw\n")

    monkeypatch.setattr(file_systems, "MOUNTS", table)
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "node"))
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    mount("nfs4")
    return folder


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "fuse.glusterfs", "wekafs", "cifs", "ceph"]
)
def test_no_database_lies_where_several_hosts_write_it(kind: str, mounts: Path) -> None:
    table = file_systems.MOUNTS
    table.write_text(table.read_text().replace("nfs4", kind))
    assert doctor.check_locks(mounts / "runs").found == f"{kind}, which several hosts share"
    assert doctor.check_prefect_home(mounts / "runs").found == str(mounts.parent / "node" / "specrl" / "prefect")
    told = doctor.check_mlflow(mounts / "runs", None)
    assert (told.status, told.found) == (
        "warn",
        f"MLflow's {mounts}/runs/mlflow.db lies on {kind}, where several hosts damage it",
    )
    assert told.fix.startswith("set tracking.uri = the address of an MLflow server")
    assert file_systems.shared_database(mounts, f"sqlite:///{mounts.parent}/mlflow.db") is None
    assert file_systems.shared_database(mounts, "http://127.0.0.1:5000") is None


def test_a_home_of_prefect_that_somebody_has_put_on_a_shared_file_system_is_named(
    mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(mounts / "home"))
    told = doctor.check_prefect_home(mounts / "runs")
    assert (told.status, told.fix) == ("warn", "unset PREFECT_HOME, or name a folder of this machine")


def test_a_file_system_without_locks_holds_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_locks(tmp_path / "runs").status == "ok"

    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    assert doctor.check_locks(tmp_path / "runs").status == "fail"


def test_a_run_on_a_cluster_says_once_what_to_set(mounts: Path, tmp_path: Path) -> None:
    values = {"name": "x", "runs_dir": str(mounts / "runs"), "model": {"source": "tiny"}}
    assert _shared_databases(parse_config(values)) == []
    [line] = _shared_databases(parse_config({**values, "cluster": {"backend": "slurm"}}))
    assert line.startswith(
        f"MLflow's {mounts}/runs/mlflow.db lies on nfs4, where several hosts damage it: set tracking."
    )
