"""All that reaches into vLLM: its sampler replaced, drafts of several sources, k changed while running, refits.

Written against vLLM 0.32.0 and its V1 model runner. On another version `require_version` says so, because everything
here names attributes that vLLM does not promise to keep.
"""

from specrl.rollout.vllm_patch.draft_head import DraftHead, install_draft_head
from specrl.rollout.vllm_patch.drafting import Drafting, agreed, draft_model, refuse_shared_head
from specrl.rollout.vllm_patch.lifecycle import model_runner, output_tokens, start, stop
from specrl.rollout.vllm_patch.sampler import InvariantSampler, RequestRecord, request_seed, seed_argument
from specrl.rollout.vllm_patch.timing import IterationTimes, iteration_times
from specrl.rollout.vllm_patch.version import VLLM_VERSION, require_version
from specrl.rollout.vllm_patch.weights import linear_output, reload_weights

__all__ = [
    "VLLM_VERSION",
    "DraftHead",
    "Drafting",
    "InvariantSampler",
    "IterationTimes",
    "RequestRecord",
    "agreed",
    "draft_model",
    "install_draft_head",
    "iteration_times",
    "linear_output",
    "model_runner",
    "output_tokens",
    "refuse_shared_head",
    "reload_weights",
    "request_seed",
    "require_version",
    "seed_argument",
    "start",
    "stop",
]
