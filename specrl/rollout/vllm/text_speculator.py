"""Drafts from text on vLLM's second model runner, with or without one of vLLM's own speculators beside it.

`init_speculator` replaces the runner's function of that name; see `replacements`. The runner keeps the object of vLLM's
class that it knows how to load, capture and refit; its `propose` becomes that of a `TextSpeculator`, which is its
attribute `text`. `additional_config["drafter_k"]` is the maximum number of passes of vLLM's own speculator; 0 with the
method `ngram_gpu` means text alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import spec_decode
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from specrl.rollout.drafts.device_drafts import Batch, DeviceDrafts, Requests
from specrl.rollout.drafts.text_index import END

_PROPOSE = inspect.signature(BaseSpeculator.propose)


class TextSpeculator:
    """Drafts from text where that is expected to yield more tokens than vLLM's speculator."""

    def __init__(self, speculator: Any, requests: Any, drafter_k: int, device: torch.device) -> None:
        """Draft for the `requests`, the runner's `RequestState`, whose attribute `drafts` verification reads."""
        self.drafter_k = drafter_k
        """The drafter's maximum number of passes. With 0 a model still reads all tokens, so that it can draft later."""
        k = speculator.num_speculative_steps
        self.drafts = requests.drafts = drafts_on(device, requests.max_num_reqs, k)
        self.drafts.has_drafter = drafter_k > 0
        self._requests, self._speculator, self._propose = requests, speculator, speculator.propose

    @torch.inference_mode()
    def propose(self, *arguments: Any, **options: Any) -> Tensor:
        """Make the next draft of each request, int64 [requests, k]; the arguments are those of `BaseSpeculator`."""
        given = _PROPOSE.bind(self, *arguments, **options)
        given.apply_defaults()
        asked: dict[str, Any] = given.arguments
        del asked["self"]
        length = asked["num_speculative_tokens"]
        length = self.drafts.k if length is None else length
        passes, batch = min(length, self.drafter_k), Batch(asked["input_batch"].idx_mapping, asked["num_sampled"])
        if asked["dummy_run"]:
            self._from_drafter(asked, passes)
            return torch.zeros_like(self._requests.draft_tokens[: asked["input_batch"].num_reqs])
        # Also while nothing is drafted, so that the possible gain from text is known.
        self.drafts.observe(self._known(), batch)
        return self.drafts.choose(self._known(), batch, self._from_drafter(asked, passes), length)

    def _known(self) -> Requests:
        requests = self._requests
        return Requests(requests.facts.gpu, requests.total_len.gpu, requests.all_token_ids.gpu)

    def _from_drafter(self, asked: dict[str, Any], passes: int) -> Tensor | None:
        speculator, is_lookup = self._speculator, isinstance(self._speculator, NgramGPUSpeculator)
        if is_lookup and not passes:
            return None
        if isinstance(speculator, StandaloneARSpeculator):  # it reads its number of passes only here
            speculator.num_speculative_steps = max(passes, 1)
        drafts: Tensor = self._propose(**asked | {"num_speculative_tokens": passes})
        if is_lookup and not asked["dummy_run"]:
            drafts = self._found(drafts, asked)
        return drafts[:, :passes].clone() if passes else None

    def _found(self, drafts: Tensor, asked: Mapping[str, Any]) -> Tensor:
        lookup = self._speculator
        # What it keeps of its search: n * (longest sequence + 1) + place + 1, the largest, or 0.
        score = lookup.scratch[: len(drafts)].amax(1) - 1
        size = torch.div(score, lookup.max_model_len + 1, rounding_mode="floor")
        first = score - size * (lookup.max_model_len + 1) + size
        available = self._requests.total_len.gpu[asked["input_batch"].idx_mapping] - first
        available = torch.where((score >= 0) & (asked["num_sampled"] > 0), available, 0)
        return torch.where(torch.arange(drafts.shape[1], device=drafts.device) < available[:, None], drafts, END)


def drafts_on(device: torch.device, num_slots: int, k: int) -> DeviceDrafts:
    """Choose drafts with Triton kernels on CUDA and with PyTorch elsewhere; the results are equal."""
    if device.type != "cuda":
        return DeviceDrafts(num_slots, k, device)
    from specrl.rollout.drafts.kernels import TritonDrafts

    return TritonDrafts(num_slots, k, device)


def init_speculator(vllm_config: VllmConfig, device: torch.device, req_states: Any) -> Any:
    """Create vLLM's speculator, with its `propose` replaced by a `TextSpeculator`'s."""
    speculator = spec_decode.init_speculator(vllm_config, device, req_states)
    drafter_k = vllm_config.additional_config.get("drafter_k", speculator.num_speculative_steps)
    speculator.text = TextSpeculator(speculator, req_states, drafter_k, device)
    speculator.propose = speculator.text.propose
    return speculator
