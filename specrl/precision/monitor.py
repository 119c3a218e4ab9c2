"""Precision as a step shows it: FP8 where the recipe says so, scales of the KV cache, and engines that agree."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from specrl.config import Config
from specrl.distributed import Ranks
from specrl.precision.gate import check_agreement
from specrl.precision.kv_scales import KvObserver
from specrl.precision.mismatch import rollout_mismatch
from specrl.precision.recipe import KvScales, Mode
from specrl.schemas import Rollout
from specrl.timeline import Timer


class GenerationPrecision(Protocol):
    """What must be known of the rollout engine."""

    def assert_quantised(self) -> None:
        """Raise NotQuantisedError unless the engine computed in FP8 where it should."""


class TrainingPrecision(Protocol):
    """What must be known of the trainer's linear layers where they compute in FP8."""

    @property
    def mode(self) -> Mode: ...

    def assert_quantised(self, *, trained: bool) -> None:
        """Raise NotQuantisedError unless the layers computed in FP8 where they should."""


class PrecisionMonitor:
    """Checks and measures the precision of one rank's engine and trainer, step by step."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        generation: GenerationPrecision,
        training: TrainingPrecision | None,
        kv_observer: KvObserver | None,
        layers_path: Path,
    ) -> None:
        """Monitor one rank.

        Args:
            training: None where the trainer computes in BF16 or FP32.
            kv_observer: measures the scales of an FP8 KV cache; None where the cache is not in FP8.
            layers_path: the calibration's table of layers, quoted to whoever must see where the engines disagree.
        """
        self._config, self._ranks = config, ranks
        self._generation, self._training, self._kv_observer = generation, training, kv_observer
        self._layers_path = layers_path
        self._is_checked = False

    @property
    def training_mode(self) -> Mode:
        """How the trainer computes FP8: `native`, `emulated`, or `off`."""
        return self._training.mode if self._training is not None else "off"

    def check_quantised(self, num_tokens: float) -> None:
        """Check once that engine and trainer compute FP8 where they should: silently off, it would never be noticed.

        Args:
            num_tokens: tokens that the step trained on. A trainer that was given none has computed nothing yet, and is
                checked after a later step.

        Raises:
            NotQuantisedError: the error names the first layer that computed in another precision.
        """
        if self._is_checked:
            return
        self._generation.assert_quantised()
        if self._training is not None and num_tokens:
            self._training.assert_quantised(trained=True)
        self._is_checked = self._training is None or num_tokens > 0

    def measure_kv_scales(self, timer: Timer) -> KvScales | None:
        """Return the scales of an FP8 KV cache for the tokens that the step trained on; collective.

        Args:
            timer: gets the seconds that observing and measuring took, as `kv_scales`.

        Returns:
            None where the cache is not in FP8 or nothing was trained on: the engine then keeps its scales.
        """
        found = self._kv_observer.take(self._ranks) if self._kv_observer is not None else None
        if found is None:
            return None
        scales, timer.scattered["kv_scales"] = found
        return scales

    def check_agreement(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Return how far generation and training disagree about the tokens trained on, as `mismatch/...` metrics.

        Raises:
            EngineMismatchError: they disagree by more than `precision.max_token_mult_prob_error`.
        """
        metrics = rollout_mismatch(rollouts)
        check_agreement(metrics, self._config.precision.max_token_mult_prob_error, self._layers_path)
        return metrics
