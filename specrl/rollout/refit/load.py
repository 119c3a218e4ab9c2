"""Refits: load the trainer's policy and drafter into the engine, and check that it holds them (invariant 4)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from specrl.distributed import Ranks
from specrl.precision.recipe import KvScales
from specrl.rollout.engine import Engine
from specrl.rollout.errors import RefitError
from specrl.rollout.refit.drafter_guard import DrafterGuard
from specrl.rollout.refit.policy_probe import RefitProbe
from specrl.rollout.vllm.weights.comparison import Expected
from specrl.training.drafter.trainer import Drafter
from specrl.training.megatron.policy import Policy

logger = logging.getLogger(__name__)


@dataclass
class Refit:
    """Loads weights into the engine of each rank and checks them. `load` is collective over the ranks."""

    engine: Engine
    policy: Policy
    drafter: Drafter | None
    probe: RefitProbe
    guard: DrafterGuard
    ranks: Ranks

    def load(self, version: int, kv_scales: KvScales | None = None, *, probe: bool = True) -> dict[str, float]:
        """Load the trainer's policy and drafter into the engine; return the checks' metrics under their MLflow names.

        A wrong drafter is no error: `DrafterGuard` replaces it.

        Args:
            kv_scales: New scales of an FP8 KV cache; None keeps the old ones.
            probe: Whether to probe the drafter; the first refit always does.

        Raises:
            RefitError: A tensor is missing, unknown or wrong, or the engine's log-probs are not the trainer's. Tensors
                are compared in every refit, except those of a policy with experts in native FP8.
                It is raised on every rank, whichever rank found it.
        """
        self.engine.wake()
        self._on_all_ranks(lambda: self._send(kv_scales))
        differences = self._on_all_ranks(lambda: self.probe.check(self.engine, self.policy))
        return differences | self.guard.check(version, probe=probe)

    def _send(self, kv_scales: KvScales | None) -> None:
        expected = self.engine.expected_policy()
        drafter_weights = self.drafter.named_weights() if self.drafter is not None else None
        self.engine.refit(self._policy_weights(expected), drafter_weights, kv_scales=kv_scales)
        if expected is not None:
            expected.check()
        else:
            logger.info('the policy\'s tensors are not compared: precision.generation = "fp8" rounds experts on a GPU')

    def _policy_weights(self, expected: Expected | None) -> Iterator[tuple[str, Tensor]]:
        weights = self.policy.hf_weights()
        for name, tensor in weights if expected is None else expected.noted(weights):
            if self.drafter is not None:
                self.drafter.share(name, tensor)
            yield name, tensor

    def _on_all_ranks[Result](self, check: Callable[[], Result]) -> Result:
        # An error on any rank is raised on all ranks, so that none waits for one that has gone.
        error: RefitError | None = None
        try:
            result = check()
        except RefitError as raised:
            error = raised
        errors = self.ranks.gather(error)
        found = next((other for other in errors if other is not None), None)
        if found is None:
            return result
        raise error or found
