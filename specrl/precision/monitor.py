"""The checks of precision in each step: FP8 is on where it should be, the KV cache has scales, the engines agree."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from specrl.config import Config
from specrl.distributed import Ranks
from specrl.precision.gate import check_agreement
from specrl.precision.kv_scales import KvObserver
from specrl.precision.mismatch import MismatchSums
from specrl.precision.recipe import KvScales, Mode
from specrl.timeline import Timer


class GenerationPrecision(Protocol):
    """The part of the rollout engine that the monitor uses."""

    def assert_quantised(self) -> None:
        """Raise NotQuantisedError unless the engine computed in FP8 where it should."""


class TrainingPrecision(Protocol):
    """The part of the trainer's FP8 linear layers that the monitor uses."""

    @property
    def mode(self) -> Mode:
        """How they compute FP8."""
        ...

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
            training: The trainer's linear layers; None where it computes in BF16 or FP32.
            kv_observer: None where the KV cache is not in FP8.
            layers_path: The calibration's table of layers, which the error quotes when the engines disagree.
        """
        self._config, self._ranks = config, ranks
        self._generation, self._training, self._kv_observer = generation, training, kv_observer
        self._layers_path = layers_path
        self._is_checked = False

    @property
    def training_mode(self) -> Mode:
        """How the trainer computes FP8: `native`, `emulated`, or `off`."""
        return self._training.mode if self._training is not None else "off"

    def check_engine(self) -> None:
        """Raise NotQuantisedError unless the engine, before it sleeps, has computed in FP8 where it should.

        It is done in every step, because each refit brings weights and scales.
        """
        self._generation.assert_quantised()

    def check_trainer(self, num_tokens: float) -> None:
        """Raise NotQuantisedError unless the trainer has computed in FP8 where it should, once it has computed."""
        if self._training is not None and num_tokens and not self._is_checked:
            self._training.assert_quantised(trained=True)
            self._is_checked = True

    def measure_kv_scales(self, timer: Timer) -> KvScales | None:
        """The scales of an FP8 KV cache for the tokens trained on, None without any (collective).

        The timer records as `kv_scales` the seconds that observing and measuring took.
        """
        found = self._kv_observer.take(self._ranks) if self._kv_observer is not None else None
        if found is None:
            return None
        scales, timer.scattered["kv_scales"] = found
        return scales

    def check_agreement(self, mismatch: MismatchSums) -> dict[str, float]:
        """The `mismatch/...` metrics over all ranks' tokens; raise EngineMismatchError above the limit (collective)."""
        metrics = mismatch.over(self._ranks).metrics()
        check_agreement(metrics, self._config.precision.max_token_mult_prob_error, self._layers_path)
        return metrics
