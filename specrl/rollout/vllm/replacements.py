"""Everything of vLLM that is replaced for its second model runner, with the reasons and the tests."""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import torch

from specrl.rollout.vllm import cpu_kernels

SAMPLER = "specrl.rollout.vllm.device_sampler"
SPECULATOR = "specrl.rollout.vllm.text_speculator"


class Replacement(NamedTuple):
    """An attribute of a module of vLLM's runner (`cpu_kernels.RUNNER`), and what takes its place."""

    attribute: str
    by: str
    """The import path."""
    reason: str
    test: str


REPLACEMENTS = (
    Replacement(
        "model_runner.Sampler",
        f"{SAMPLER}.InvariantSampler",
        "a token depends on the policy, the request's seed and the position alone; vLLM's noise is of another kind",
        "tests/exactness/test_second_runner.py::test_drafts_schedules_and_batches_change_no_token",
    ),
    Replacement(
        "model_runner.RejectionSampler",
        f"{SAMPLER}.InvariantVerifier",
        "a draft is accepted when it is the token that is picked; vLLM's own depends on the drafter",
        "tests/exactness/test_second_runner.py::test_drafts_schedules_and_batches_change_no_token",
    ),
    Replacement(
        "sample.prompt_logprob.compute_topk_scores",
        f"{SAMPLER}.score",
        "prompts are scored in one pass; vLLM ranks every token in two more, by kernels that CPUs lack",
        "tests/exactness/test_second_runner.py::test_sampled_logprobs_are_those_of_scoring",
    ),
    Replacement(
        "model_runner.RequestState",
        f"{SPECULATOR}.KnownRequests",
        "drafts from text need the prompt and the end of each request, and vLLM tells speculators neither",
        "tests/exactness/test_text_speculator.py::test_text_changes_no_token_and_is_counted",
    ),
    Replacement(
        "model_runner.init_speculator",
        f"{SPECULATOR}.init_speculator",
        "vLLM drafts with one speculator, none of which drafts from stored text",
        "tests/exactness/test_text_speculator.py::test_text_changes_no_token_and_is_counted",
    ),
)


def prepare() -> None:
    """Choose the second model runner; to be called before vLLM is imported."""
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_RAISE_ON_LOGIT_NANS="1")
    if not torch.cuda.is_available():
        cpu_kernels.register_backend()


def install() -> None:
    """Replace what `REPLACEMENTS` names and, on CPUs, the kernels; to be called before an engine starts."""
    if not torch.cuda.is_available():
        # It makes torch and vLLM's buffers do without CUDA, and must come before the runner's modules.
        importlib.import_module("vllm.v1.worker.cpu.shm")
        cpu_kernels.install()
    for replacement in REPLACEMENTS:
        module, attribute = replacement.attribute.rsplit(".", 1)
        owner = importlib.import_module(f"{cpu_kernels.RUNNER}.{module}")
        assert hasattr(owner, attribute), replacement.attribute
        setattr(owner, attribute, _imported(replacement.by))


def _imported(path: str) -> Any:
    module, attribute = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute)
