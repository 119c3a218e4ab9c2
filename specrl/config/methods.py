"""The table of draft methods: one row for each value of `speculation.method`.

Configuration, engine, benchmarks and reports read the properties of a method from its row and never compare names, so a
new method needs only a new row. `CONTRIBUTING.md` shows how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class DraftMethod:
    """Where drafts come from.

    A method drafts with one of vLLM's speculators (`vllm`), from text (`replays`), or with both; then text is used
    where more tokens are expected to be accepted. A method with neither decodes without speculation.
    """

    name: str  # the value of `speculation.method`
    vllm: Mapping[str, Any] | None = None
    """The arguments of vLLM's `speculative_config`, except the number of tokens and the model's directory, which follow
    from the configuration. None if vLLM itself proposes nothing."""
    model: Literal["drafter", "policy_layer", "draft_model"] | None = None
    """The model that drafts inside vLLM: a `drafter` in its own directory, trained along with the policy; a
    `policy_layer`, the multi-token-prediction layer of the policy's own checkpoint, which is trained as well; or the
    `draft_model` of the configuration, which stays as it is. None if vLLM drafts without a model."""
    replays: bool = False
    """Whether text serves as drafts: stored responses to the same prompt, such as those pre-generated in idle time, and
    the engine's latest responses to any prompt."""

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted at all."""
        return self.vllm is not None or self.replays

    @property
    def has_weights(self) -> bool:
        """Whether a drafter is pretrained, trained along with the policy, refitted and exported."""
        return self.model in ("drafter", "policy_layer")

    @property
    def is_policy_layer(self) -> bool:
        """Whether the drafter is a layer of the policy's checkpoint, with the policy's head and vocabulary."""
        return self.model == "policy_layer"

    def same_model(self, other: DraftMethod) -> bool:
        """Whether this method can draft with the model made for `other`."""
        kinds = [(method.model, (method.vllm or {}).get("method")) for method in (self, other)]
        return kinds[0] == kinds[1]


EAGLE3 = {"method": "eagle3", "use_local_argmax_reduction": True}  # without logits of the whole vocabulary
MTP = {"method": "mtp"}
NGRAM = {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""N-gram lookup in the sequence so far, with the lengths in tokens of the shortest and the longest n-gram."""
DRAFT_MODEL = {"method": "draft_model"}

METHODS: dict[str, DraftMethod] = {
    row.name: row
    for row in (
        DraftMethod("none"),
        DraftMethod("eagle3", EAGLE3, "drafter"),
        DraftMethod("eagle3+replay", EAGLE3, "drafter", replays=True),
        DraftMethod("mtp", MTP, "policy_layer"),
        DraftMethod("mtp+replay", MTP, "policy_layer", replays=True),
        DraftMethod("ngram", NGRAM),
        DraftMethod("ngram+replay", NGRAM, replays=True),
        DraftMethod("replay", replays=True),
        DraftMethod("draft_model", DRAFT_MODEL, "draft_model"),
        DraftMethod("draft_model+replay", DRAFT_MODEL, "draft_model", replays=True),
    )
}
"""All methods by name."""


def check_method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f'speculation.method = "{name}": allowed: {", ".join(METHODS)}')
    return name
