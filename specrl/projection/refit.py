"""The bytes that one GPU receives in a refit; tests compare them with what ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass

from specrl.config import PolicyConfig
from specrl.models.shapes import ModelShape


@dataclass(frozen=True)
class RefitCost:
    """What one GPU receives, in bytes, while the policy's weights go to the engines."""

    stage_bytes: int  # from the other pipeline stages, as broadcasts
    rank_bytes: int  # from the other tensor-parallel or expert-parallel ranks, as gathers
    sent_bytes: int  # all broadcasts of the GPU's pipeline group, which come one after another

    def seconds(self, *, between_stages: float, inside: float) -> float:
        """Compute the time at so many bytes per second between pipeline stages, and inside each."""
        return self.sent_bytes / between_stages + self.rank_bytes / inside


def vocabulary_bytes(shape: ModelShape, policy: PolicyConfig, element_size: int) -> int:
    """Count the bytes of the embeddings, whole and padded so that tensor-parallel ranks share them evenly."""
    ranks = policy.tensor_parallel
    return -(-shape.vocab_size // ranks) * ranks * shape.hidden_size * element_size


def refit_cost(
    shape: ModelShape, policy: PolicyConfig, *, element_size: int = 2, stage: int | None = None
) -> RefitCost:
    """Count what a GPU receives in one refit, of ranks that share the policy as `policy` says, each with whole experts.

    Args:
        element_size: The bytes of one weight.
        stage: The pipeline stage of the GPU; by default the one that receives most.
    """
    tensor, stages, expert = policy.tensor_parallel, policy.pipeline_parallel, policy.expert_parallel
    # Every tensor-parallel rank holds norms and router whole.
    copied = 2 * shape.hidden_size + (2 * shape.head_dim if shape.family.qk_norm else 0)
    copied = (copied + shape.num_experts * shape.hidden_size) * element_size
    experts = shape.expert_parameters_per_layer * element_size
    shared = shape.parameters_per_layer * element_size - copied - experts
    vocabulary, norm = vocabulary_bytes(shape, policy, element_size), shape.hidden_size * element_size
    held = [shape.num_layers // stages * (copied + shared // tensor + experts // expert)] * stages
    held[0] += vocabulary // tensor
    held[-1] += norm + (0 if shape.tied else vocabulary // tensor)
    whole = shape.num_layers * (copied + shared + experts) + norm + vocabulary * (1 if shape.tied else 2)
    own = min(held) if stage is None else held[stage]
    return RefitCost(sum(held) - own, whole - sum(held), sum(held) if stages > 1 else 0)
