"""All replacements of parts of vLLM except the kernels in `cpu_kernels`, with their reasons and tests."""

from __future__ import annotations

import importlib
from inspect import getattr_static
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from specrl.rollout.vllm import cpu_kernels

RUNNER = cpu_kernels.RUNNER
SAMPLER = "specrl.rollout.vllm.device_sampler"
SPECULATOR = "specrl.rollout.vllm.text_speculator"
PATCHES = "specrl.rollout.vllm.engine.patches"
SAME_TOKENS = "tests/exactness/test_token_for_token.py::test_every_source_and_k_gives_the_tokens_of_plain_decoding"
_original: dict[str, Any] = {}
"""The replaced originals in this process, by name."""


class Replacement(NamedTuple):
    """An attribute of a module or class of vLLM, and its replacement."""

    attribute: str
    by: str
    """The import path."""
    reason: str
    test: str
    wraps: bool = False
    """Whether `by` is a function that receives the original and returns its replacement."""
    on_cpus: bool = False
    """Whether it applies only on CPUs."""
    on_gpus: bool = False
    """Whether it applies only on GPUs."""


REPLACEMENTS = (
    Replacement(
        f"{RUNNER}.model_runner.Sampler",
        f"{SAMPLER}.InvariantSampler",
        "a token depends on the policy, the request's seed and the position alone; vLLM's noise is of another kind",
        SAME_TOKENS,
    ),
    Replacement(
        f"{RUNNER}.model_runner.RejectionSampler",
        f"{SAMPLER}.InvariantVerifier",
        "a draft is accepted when it is the token that is picked; vLLM's own depends on the drafter",
        SAME_TOKENS,
    ),
    Replacement(
        f"{RUNNER}.sample.prompt_logprob.compute_prompt_logprobs_with_chunking",
        f"{SAMPLER}.score",
        "prompts are scored in one pass; vLLM ranks every token in two more, by kernels that CPUs lack",
        "tests/integration/test_engine.py::test_generation_logprobs_are_those_of_scoring_at_temperature_one",
    ),
    Replacement(
        f"{RUNNER}.model_runner.PromptLogprobsWorker",
        f"{SAMPLER}.PromptScorer",
        "text of a request's own seed is compared with what it would sample there; vLLM samples after prompts alone",
        "tests/exactness/test_own_text.py::test_text_of_the_own_seed_is_verified_as_a_prompt_is_read",
    ),
    Replacement(
        f"{RUNNER}.cudagraph_utils.CudaGraphManager._init_candidates",
        f"{PATCHES}.with_larger_graphs",
        "a batch finds a full graph only where the next larger one has its draft length, else it runs piecewise",
        "tests/integration/test_gpu_config.py::test_every_decoding_batch_of_every_draft_length_has_a_full_graph",
        wraps=True,
    ),
    Replacement(
        "vllm.distributed.aux_output_connector.worker.get_tp_group",
        f"{PATCHES}.FirstOfItsGroup",
        "every rank of an engine returns the experts of its tokens: each has its own scheduler, which wants them",
        "tests/integration/test_parallel_runs.py::test_trainer_and_engine_choose_the_same_experts",
    ),
    Replacement(
        "vllm.platforms.cpu.CpuPlatform.check_and_update_config",
        f"{PATCHES}.keeping_asynchronous",
        "vLLM schedules synchronously on CPUs, without a word; here they do what GPUs do",
        "tests/exactness/test_token_for_token.py::test_synchronous_scheduling_and_a_schedule_change_no_token",
        wraps=True,
        on_cpus=True,
    ),
    Replacement(
        "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator._all_group_ranks_share_shm_group_name",
        f"{PATCHES}.no_shared_memory",
        "vLLM's shared memory has a name that another job on the machine takes too, and a killed rank leaves it behind",
        "tests/integration/test_tensor_parallel.py::test_tokens_are_those_of_one_rank_before_and_after_a_refit",
        on_cpus=True,
    ),
    Replacement(
        f"{RUNNER}.model_runner.init_speculator",
        f"{SPECULATOR}.init_speculator",
        "vLLM drafts with one speculator, none of which drafts from stored text",
        "tests/exactness/test_text_speculator.py::test_text_changes_no_token_and_is_compared",
    ),
    Replacement(
        "vllm.model_executor.warmup.kernel_warmup.deep_gemm_warmup",
        f"{PATCHES}.first_on_its_node",
        "all ranks compile the same kernels, for minutes; here the first of a node does, and the others load them",
        "tests/unit/test_vllm_patches.py::test_kernels_are_compiled_by_the_first_rank_of_a_node",
        wraps=True,
        on_gpus=True,
    ),
)


def install() -> None:
    """Replace what `REPLACEMENTS` names and, on CPUs, the kernels; call it before an engine starts."""
    on_cpus = not torch.cuda.is_available()
    if on_cpus:
        # It makes torch and vLLM's buffers do without CUDA, and must come before the runner's modules.
        importlib.import_module("vllm.v1.worker.cpu.shm")
        cpu_kernels.install()
    for replacement in REPLACEMENTS:
        elsewhere = replacement.on_gpus if on_cpus else replacement.on_cpus
        if replacement.attribute in _original or elsewhere:
            continue
        path, attribute = replacement.attribute.rsplit(".", 1)
        owner, new = resolve_name(path), resolve_name(replacement.by)
        _original[replacement.attribute] = original = getattr(owner, attribute)
        new = new(original) if replacement.wraps else new
        needs_nothing = isinstance(getattr_static(owner, attribute), staticmethod | classmethod)
        setattr(owner, attribute, staticmethod(new) if needs_nothing else new)
