"""The name of this machine's processor, and its instructions for matrix products in bfloat16."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """The processor's name, or the architecture where Linux reports none."""
    return _field("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    return frozenset(_field("flags").split())


def bf16_support(flags: frozenset[str]) -> str:
    """Which of the instructions for matrix products a processor with these flags has."""
    if "amx_bf16" in flags:
        return "AMX BF16"
    if "avx512f" not in flags:
        return "no AVX-512"
    return "AVX-512 BF16, no AMX" if "avx512_bf16" in flags else "AVX-512, no BF16"


def _field(name: str) -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
