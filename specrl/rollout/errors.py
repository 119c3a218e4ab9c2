"""Errors that are raised when an engine is found wrong."""

from __future__ import annotations


class RefitError(RuntimeError):
    """The engine does not hold the weights that were sent to it."""


class PolicyParityError(RefitError):
    """The engine's policy is not the trainer's."""


class DrafterCollapseError(RefitError):
    """The engine's drafter is not the trainer's, or its drafts are no longer accepted."""


class NonFiniteLogitsError(RuntimeError):
    """The policy's logits define no distribution: one is NaN or +inf, or all are -inf."""


class SamplerError(RuntimeError):
    """The engine does not sample as the drafter-invariant sampler does; its rollouts would not be the policy's."""
