"""The locks and `make env` give the torch that is meant, and no two packages own one file."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections import defaultdict
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from specrl.report import doctor

ROOT = Path(__file__).parents[2]
GPU_PINS = doctor.read_pins(ROOT / "requirements/gpu.lock")


def install(site_packages: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write what an installer leaves of a package: its metadata and a RECORD of its files, as path and content."""
    metadata = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    records = [f"{path},sha256={content.encode().hex()},{len(content)}" for path, content in files.items()]
    (metadata / "RECORD").write_text("\n".join([*records, f"{metadata.name}/RECORD,,"]))
    for path, content in files.items():
        (site_packages / path).parent.mkdir(parents=True, exist_ok=True)
        (site_packages / path).write_text(content)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A clean copy of what `make env` reads, with nothing installed."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def make(project: Path, *arguments: str, find_links: str = "") -> subprocess.CompletedProcess[str]:
    """Run make as a user would, without what a `make test` around this one passes on."""
    passed_on = {"UV_FIND_LINKS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "LOCK", "CXX"}
    environment = {name: value for name, value in os.environ.items() if name not in passed_on}
    command = ["make", *arguments]
    return subprocess.run(
        command,
        cwd=project,
        env=environment | {"PIP_FIND_LINKS": find_links},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def collisions(site_packages: Path) -> dict[str, set[str]]:
    """The owners of each path that packages own with different contents: the one installed last decides what runs.

    Equal copies do no harm: mlflow and mlflow-skinny share theirs. flashinfer-python and torch-c-dlpack-ext ship the
    script that built them, which nobody imports.
    """
    hashes: dict[str, dict[str, str]] = defaultdict(dict)
    for package in distributions(path=[str(site_packages)]):
        for path, content, _ in csv.reader((package.read_text("RECORD") or "").splitlines()):
            if content and path != "build_backend.py":
                hashes[path][package.name] = content
    return {path: set(owners) for path, owners in hashes.items() if len(set(owners.values())) > 1}


def test_no_two_packages_of_this_environment_own_one_file() -> None:
    assert collisions(Path(sysconfig.get_path("purelib"))) == {}


def test_two_packages_that_own_one_path_are_named(tmp_path: Path) -> None:
    install(tmp_path, "cuda-bindings", "13.5.0", {"cuda/nvml.py": "13", "cuda/one.py": "1", "cuda/same.py": "same"})
    install(tmp_path, "cuda-python", "12.6.2", {"cuda/nvml.py": "12", "cuda/two.py": "2", "cuda/same.py": "same"})
    assert collisions(tmp_path) == {"cuda/nvml.py": {"cuda-bindings", "cuda-python"}}


@pytest.mark.parametrize(("cuda", "wrong"), [("'13.0'", False), ("'12.9'", True), ("None", True)])
def test_torch_is_built_for_the_cuda_version_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, wrong: bool
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    install(tmp_path, "torch", "2.13.0", {"torch/version.py": f"debug = False\ncuda: Optional[str] = {cuda}\n"})
    assert doctor.check_torch(tmp_path) == []
    install(tmp_path, "cuda-toolkit", "13.0.3.0", {})
    assert [check.status for check in doctor.check_torch(tmp_path)] == ["fail"] * wrong


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_a_build_of_torch_in_a_local_folder_satisfies_no_lock(lock: str) -> None:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    [pin] = [line.removeprefix("torch").rstrip("\\ ") for line in lines if line.startswith("torch=")]
    assert not SpecifierSet(pin).contains("2.13.0+cpu")
    assert SpecifierSet(pin).contains("2.13.0")


def test_the_gpu_lock_has_one_cuda_version() -> None:
    def cuda(name: str, parts: int) -> list[str]:
        return GPU_PINS[name].split(".")[:parts]

    assert cuda("cuda-python", 2) == cuda("cuda-bindings", 2)
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime"):
        assert cuda(name, 2) == cuda("cuda-toolkit", 2)


@pytest.mark.parametrize("find_links", ["", "/wheels"])
def test_the_gpu_environment_asks_no_driver_and_builds_transformer_engine_last(project: Path, find_links: str) -> None:
    planned = make(project, "-n", "env", "LOCK=requirements/gpu.lock", find_links=find_links)
    assert planned.returncode == 0, planned.stderr
    assert "--torch-backend" not in planned.stdout
    packages = planned.stdout.index("/d' requirements/gpu.lock | ")
    engine = planned.stdout.index("sed -n '/^transformer-engine-torch==/")
    assert packages < engine
    assert GPU_PINS["transformer-engine-torch"] == GPU_PINS["transformer-engine"]


@pytest.mark.parametrize("find_links", ["", "/wheels"])
def test_the_cpu_environment_builds_no_transformer_engine(project: Path, find_links: str) -> None:
    planned = make(project, "-n", "env", find_links=find_links).stdout
    assert "--torch-backend" not in planned
    assert "sed -n '/^transformer-engine-torch==/" not in planned


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock", "tools.lock", "docs.lock"])
def test_every_package_of_a_lock_has_its_hashes_and_no_place(lock: str) -> None:
    text = (ROOT / "requirements" / lock).read_text()
    packages = text.replace("\\\n", " ").splitlines()
    assert packages
    assert not [
        line
        for line in packages
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*={2,3}\S+( +--hash=sha256:[0-9a-f]{64})+", line)
    ]


def test_the_gpu_lock_is_compared_with_what_aarch64_resolves_to(project: Path) -> None:
    lines = make(project, "-n", "lock").stdout.splitlines()
    [own, other] = [line for line in lines if " gpu.in " in line]
    assert own.replace("x86_64-manylinux_2_28 -o gpu", "aarch64-manylinux_2_34 -o aarch64") == other
    assert lines.index(other) < lines.index(
        next(line for line in lines if line.startswith("cmp requirements/gpu.lock requirements/aarch64.lock"))
    )


def test_what_fetches_data_sets_is_asked_for_and_not_only_in_a_lock() -> None:
    asked = (ROOT / "requirements/base.in").read_text().splitlines()
    assert [line for line in asked if line.split(" ")[0] == "datasets"]


@pytest.mark.parametrize("package", ["megatron-core", "torch", "triton"])
def test_both_locks_have_one_version(package: str) -> None:
    assert doctor.read_pins(ROOT / "requirements/cpu.lock")[package] == GPU_PINS[package]


def test_megatron_core_declares_that_it_works_with_what_is_locked_beside_it() -> None:
    asked = [Requirement(line) for line in requires("megatron-core") or ()]
    for name in ("torch", "transformer-engine"):
        found = [each for each in asked if each.name == name]
        assert found, f"megatron-core asks for no {name}"
        assert all(each.specifier.contains(GPU_PINS[name]) for each in found)


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_all_that_make_env_fetches_is_asked_for_its_hash(project: Path, lock: str) -> None:
    planned = make(project, "-n", "env", f"LOCK=requirements/{lock}").stdout.replace("\\\n", " ")
    installs = [line for line in planned.splitlines() if "pip install" in line]
    assert len(installs) == (3 if lock == "cpu.lock" else 4)
    fetching = [line for line in installs if not line.endswith(" -e .")]
    assert len(fetching) == len(installs) - 1
    assert all("--require-hashes" in line for line in fetching)
    assert all("--no-build-isolation" in line for line in installs if "/uv " in line)


def test_what_is_installed_apart_is_taken_out_of_the_lock_whole(project: Path) -> None:
    planned = make(project, "-n", "env", "LOCK=requirements/gpu.lock").stdout.replace("\\\n", "")
    scripts = [shlex.split(line)[1:] for line in planned.splitlines() if line.startswith("sed ")]
    rest, apart = (run_sed(project, *words[: words.index("|")]) for words in scripts)
    lines = (project / "requirements/gpu.lock").read_text().splitlines()
    assert sorted(rest + apart) == sorted(lines)
    assert apart[0].startswith("transformer-engine-torch==")
    assert [line for line in apart[1:] if "--hash=sha256:" not in line] == []
    assert not [line for line in rest if line.startswith("transformer-engine-torch")]


def run_sed(project: Path, *arguments: str) -> list[str]:
    return subprocess.run(
        ["sed", *arguments], cwd=project, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_a_wheel_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    wheel = tmp_path / "mine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mine.py", "")
        archive.writestr("mine-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        archive.writestr("mine-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("mine-1.0.dist-info/RECORD", "")
    command = [sys.executable, "-m", "uv", "pip", "install", "--no-index", "--find-links", str(tmp_path), "--no-deps"]
    command += ["--require-hashes", "--target", str(tmp_path / "site"), "-r", "-"]
    for digest, code in ((hashlib.sha256(wheel.read_bytes()).hexdigest(), 0), ("0" * 64, 1)):
        lock = f"mine==1.0 \\\n    --hash=sha256:{digest}\n"
        done = subprocess.run(command, input=lock, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert ("Hash mismatch" in done.stderr) == bool(code)
        shutil.rmtree(tmp_path / "site", ignore_errors=True)


@pytest.mark.parametrize("present", [(), ("munged",), ("slurmctld", "slurmdbd", "munged", "mariadbd")])
def test_ci_installs_slurm_unless_all_its_programs_are_there(tmp_path: Path, present: tuple[str, ...]) -> None:
    for name in (*present, "apt-get", "make"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} >>"{tmp_path}/calls"\n')
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    subprocess.run(["bash", str(ROOT / ".ci/run")], env={"PATH": str(tmp_path)}, check=True)
    calls = (tmp_path / "calls").read_text().split()
    assert calls == ([] if len(present) == 4 else ["apt-get", "apt-get"]) + ["make", "make"]


def test_ci_takes_the_newest_of_pyenvs_pythons_where_none_is_chosen(tmp_path: Path) -> None:
    scripts = {
        "python3.12": 'test "$PYENV_VERSION" = 3.12.9',
        "pyenv": 'test "$*" = "latest 3.12" && echo 3.12.9',
        "make": f'echo "make $1 $PYENV_VERSION" >>"{tmp_path}/calls"',
    }
    scripts |= dict.fromkeys(("slurmctld", "slurmdbd", "munged", "mariadbd"), "true")
    for name, line in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    subprocess.run(["bash", str(ROOT / ".ci/run")], env={"PATH": str(tmp_path)}, check=True)
    assert (tmp_path / "calls").read_text().splitlines() == ["make check 3.12.9", "make test-all 3.12.9"]


def test_a_machine_without_a_compiler_is_told_in_one_line(project: Path) -> None:
    (project / ".venv").mkdir()
    (project / ".venv/.installed-gpu.lock").touch()
    stamp = f".venv/.transformer-engine-torch=={GPU_PINS['transformer-engine']}-torch==={GPU_PINS['torch']}"
    told = make(project, stamp, "LOCK=requirements/gpu.lock", "CXX=no-such-compiler")
    assert told.returncode != 0
    assert "there is no no-such-compiler: install g++" in told.stdout
    assert len(told.stdout.splitlines()) == 1
    assert not (project / stamp).exists()


def test_both_images_have_the_packages_of_the_gpu_lock_and_the_python_that_it_is_for() -> None:
    lines = []
    for name in ("Dockerfile", "apptainer.def"):
        text = (ROOT / "requirements/images" / name).read_text()
        lines.append(
            {line.removeprefix("RUN ").strip() for line in text.splitlines() if "make" in line and "#" not in line}
        )
        assert "==" not in text and "pip" not in text, "versions are the lock's alone"
        assert re.search(r"^(FROM|From:) python:3\.12-", text, re.M)
        for copied in ("Makefile", "pyproject.toml", "requirements", "specrl"):
            assert copied in text and (ROOT / copied).exists()
    assert lines[0] == lines[1]
    assert "make env LOCK=requirements/gpu.lock PYTHON=python3.12" in lines[0]
    assert "PYTHON ?= python3.12" in (ROOT / "Makefile").read_text()
