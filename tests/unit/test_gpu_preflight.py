"""What a job with GPUs looks at in its first seconds; every failure is one line that says what mends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flows.preflight import check_gpu_packages
from slurm.backend import StageRequest
from slurm.supervisor import check_rank, line_of, needs_of
from specrl.checks.gpu import (
    GpuFacts,
    GpuNeeds,
    as_version,
    check_nvcc,
    check_without_driver,
    compile_problem,
    cuda_of_build,
    gather_facts,
    gpu_checks,
    own_cuda_home,
    torch_for_gpus,
)
from specrl.config import Config, StageName, parse_config
from specrl.context import StageContext
from specrl.projection.plan import device_bytes

FACTS = GpuFacts(
    driver="580.82.07",
    driver_cuda=(13, 0),
    torch="2.13.0+cu130",
    torch_cuda=(13, 0),
    capability=(9, 0),
    free_gib=138.0,
    total_gib=139.8,
    nccl=(2, 29, 7),
    nccl_package=(2, 29, 7),
    transformer_engine="2.20.2",
    nvcc=(13, 0),
)
NEEDS = GpuNeeds(
    engine_fraction=0.45,
    planned_gib=60.0,
    given_gib=139.0,
    transformer_engine=True,
    fp8_generation=True,
    several_ranks=True,
)


def failures(facts: GpuFacts, needs: GpuNeeds = NEEDS) -> list[str]:
    found = gpu_checks(facts, needs)
    assert all(check.fix for check in found if check.status != "ok")
    return [line_of(check) for check in found if check.status == "fail"]


def test_a_gpu_that_can_do_it_all_passes() -> None:
    assert [check.status for check in gpu_checks(FACTS, NEEDS)] == ["ok"] * 6


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"driver_cuda": (12, 8), "driver": "570.86"}, "570.86, CUDA 12.8; torch 2.13.0+cu130 needs CUDA 13.0; a driv"),
        ({"driver_cuda": None}, "GPU driver: no NVIDIA driver; torch 2.13.0+cu130 needs CUDA 13.0; a driver R580"),
        ({"torch_cuda": None}, "packages of this environment are for CPUs; make env LOCK=requirements/gpu.lock"),
        ({"torch_problem": "No CUDA GPUs are available", "total_gib": 0.0}, "torch sees none: No CUDA GPUs"),
        ({"capability": (8, 0)}, 'compute capability 8.0 has no FP8 in blocks; precision.generation = "bf16"'),
        ({"free_gib": 20.0}, "GPU memory: 20.0 of 139.8 GiB free; this stage needs 62.9 GiB; another process"),
        ({"nccl": (2, 18, 5)}, "NCCL: 2.18.5 is loaded, the package is 2.29.7; unset LD_LIBRARY_PATH"),
        ({"transformer_engine": None}, "Transformer Engine: not installed"),
        ({"transformer_engine_problem": "undefined symbol: _ZN3c10"}, "cannot be imported: undefined symbol"),
        ({"nvcc": None}, "nvcc: none, to compile DeepGEMM's FP8 kernels; make env"),
        (
            {"compile_problem": "error: headers are incompatible"},
            "nvcc: 13.0 cannot compile DeepGEMM's FP8 kernels: error: headers are incompatible; unset CUDA_HOME",
        ),
        ({"nvcc": (12, 4)}, "nvcc: 12.4, for DeepGEMM's FP8 kernels; set CUDA_HOME to a CUDA toolkit 12.9 or newer"),
    ],
)
def test_each_failure_is_one_line_with_its_way_out(changed: dict[str, object], words: str) -> None:
    [line] = failures(replace(FACTS, **changed))
    assert words in line and "\n" not in line


def test_only_what_a_stage_uses_is_asked_for() -> None:
    without = replace(FACTS, nccl=None, transformer_engine=None, nvcc=None, capability=(8, 0))
    assert failures(without, GpuNeeds(engine_fraction=0.9)) == []
    assert failures(replace(FACTS, free_gib=100.0), GpuNeeds(engine_fraction=0.9))  # vLLM would refuse to start
    compiling = replace(without, compiles_flashinfer=True)
    assert [check.status for check in gpu_checks(compiling, GpuNeeds()) if check.name == "nvcc"] == ["warn"]


def test_a_smaller_gpu_than_the_plans_is_named() -> None:
    [line] = failures(replace(FACTS, total_gib=79.1, free_gib=78.5), replace(NEEDS, planned_gib=96.0))
    assert "the plan counts 96.0 GiB; set gpu_memory_gib = 79" in line


def test_a_stage_asks_for_what_it_runs() -> None:
    config = parse_config(
        {
            "name": "gpu",
            "model": {"source": "Qwen/Qwen3-8B", "max_length": 1024},
            "precision": {"generation": "fp8"},
            "resources": {"gpus_per_rank": 1, "ranks_per_node": 2, "gpu_memory_gib": 141.0},
            "stage_resources": {"prepare": {"ranks_per_node": 1}},
        }
    )

    def needs(stage: StageName) -> GpuNeeds:
        return needs_of(config, stage, device_bytes(config, stage))

    assert needs("prepare") == GpuNeeds(given_gib=141.0, planned_gib=3.0, transformer_engine=True)
    train = needs("train")
    assert train.fp8_generation and train.several_ranks and train.transformer_engine
    assert train.engine_fraction == config.engine.gpu_memory_fraction
    assert train.planned_gib > 16
    assert not needs("validate").transformer_engine


def test_versions_are_read_from_what_is_installed() -> None:
    assert cuda_of_build("2.13.0+cu130") == (13, 0)
    assert cuda_of_build("2.13.0+cu129") == (12, 9)
    assert cuda_of_build("2.13.0+cpu") is None
    assert torch_for_gpus() is None, "vLLM here is the one for CPUs"
    assert as_version("2.29.7") == (2, 29, 7)
    assert as_version(None) is None
    assert "CUDA 13.0, a driver R580 or newer" in check_without_driver("2.13.0+cu130").found
    assert check_without_driver(None).found == "none; runs use the CPU"


def test_the_facts_of_this_machine_can_be_gathered() -> None:
    facts = gather_facts(use_torch=True)
    assert facts.torch is not None
    if facts.torch_problem is not None:
        assert failures(facts)  # a job that was given no GPU says so


def test_a_rank_that_sees_all_gpus_looks_at_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (chosen[-1] * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert (gather_facts(use_torch=True).free_gib, chosen) == (5.0, [5])


def test_a_run_with_gpus_is_not_submitted_from_an_environment_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"name": "gpu", "stage_resources": {"train": {"gpus_per_rank": 1}}})
    monkeypatch.setattr("flows.preflight.torch_for_gpus", lambda: None)
    [line] = check_gpu_packages(config)
    assert "gpus_per_rank = 1 in train: the packages of this environment are for CPUs; make env" in line
    assert check_gpu_packages(Config(name="cpu")) == []
    for cluster in ({"python": "/opt/venv/bin/python"}, {"container": {"kind": "apptainer", "image": "gpu.sif"}}):
        elsewhere = {"name": "gpu", "stage_resources": {"train": {"gpus_per_rank": 1}}, "cluster": cluster}
        assert check_gpu_packages(parse_config(elsewhere)) == []
    monkeypatch.setattr("flows.preflight.torch_for_gpus", lambda: "2.13.0")
    assert check_gpu_packages(config) == []


def test_a_job_that_got_no_gpu_ends_before_it_loads_a_model(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    config = parse_config({"name": "gpu", "runs_dir": str(tmp_path), "resources": {"gpus_per_rank": 1}})
    context = StageContext(config, "train", "train-0", tmp_path / "train-0", {}, "")
    with pytest.raises(ValueError, match=r"GPU driver: .*\n.*torch sees none: "):
        check_rank(StageRequest(context, entry="specrl.stages.train:main"))
    check_rank(StageRequest(context, entry="my_module:main"))


def test_a_rank_learns_from_its_context_what_the_plan_counts(tmp_path: Path) -> None:
    context = StageContext(Config(name="run"), "train", "train-0", tmp_path, {}, "", device_bytes=3 * 2**30)
    context.save(tmp_path / "context.json")
    assert StageContext.load(tmp_path / "context.json").device_bytes == 3 * 2**30


def compiler(path: Path, release: str, words: str = "") -> None:
    """A program that says which release it is, and compiles unless it has words against it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f'if [ "$1" = --version ]; then echo "Cuda compilation tools, release {release}, V"; exit 0; fi'
    path.write_text(f"#!/bin/sh\n{text}\n{f'echo {words} >&2; exit 2' if words else 'exit 0'}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("site", "own", "home", "status"),
    [
        (None, None, None, "fail"),
        (None, "13.0", "own", "ok"),
        ("13.0", "13.0", None, "ok"),
        ("12.4", "13.0", "own", "ok"),
        ("12.9", "13.0", "own", "ok"),
        ("12.4", None, None, "fail"),
    ],
)
def test_fp8_has_a_compiler_that_fits_or_the_job_ends(
    site: str | None, own: str | None, home: str | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/site:/usr/bin:/bin")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "packages"))
    monkeypatch.setattr("specrl.checks.gpu._version", {"torch": "2.13.0+cu130"}.get)
    monkeypatch.setattr("specrl.checks.gpu.SYSTEM_CUDA", str(tmp_path / "none"))
    if site is not None:
        compiler(tmp_path / "site" / "nvcc", site)
    if own is not None:
        compiler(tmp_path / "packages" / "nvidia" / "cu13" / "bin" / "nvcc", own)
    found = own_cuda_home()
    assert found == (str(tmp_path / "packages" / "nvidia" / "cu13") if home else None)
    before = check_nvcc(gather_facts(use_torch=False), NEEDS)
    monkeypatch.setenv("CUDA_HOME", found or "")  # as a rank does
    assert (before.status, check_nvcc(gather_facts(use_torch=False), NEEDS).status) == (status, status)


def test_a_compiler_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    compiler(tmp_path / "works", "13.0")
    compiler(tmp_path / "fails", "13.0", "'cicc: error: not found'")
    assert compile_problem(str(tmp_path / "works"), (9, 0)) is None
    assert compile_problem(str(tmp_path / "fails"), (9, 0)) == "cicc: error: not found"
    assert "No such file" in str(compile_problem(str(tmp_path / "absent"), (9, 0)))
