"""The checks of precision in each step: FP8 is on where it should be, the KV cache has scales, the engines agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specrl.config import Config
from specrl.distributed import Ranks
from specrl.precision.kv_scales import KvObserver
from specrl.precision.mismatch import MismatchSums
from specrl.precision.recipe import KvScales, Mode
from specrl.rollout.engine import Engine
from specrl.schemas import read_table
from specrl.training.megatron.fp8 import LinearPrecision

MOST_ROWS = 12


class EngineMismatchError(RuntimeError):
    """Training and generation disagree by more than the run allows."""


@dataclass
class PrecisionMonitor:
    """Checks and measures the precision of one rank's engine and trainer, step by step."""

    config: Config
    ranks: Ranks
    generation: Engine
    training: LinearPrecision | None  # None if the trainer's layers are not in FP8
    kv_observer: KvObserver | None  # None if the KV cache is not in FP8
    layers_path: Path
    is_checked: bool = False  # whether the trainer has computed since the start

    @property
    def training_mode(self) -> Mode:
        return self.training.mode if self.training is not None else "off"

    def check_engine(self) -> None:
        """Raise NotQuantisedError unless the engine has computed in FP8 where it should since the last refit."""
        self.generation.assert_quantised()

    def check_trainer(self, num_tokens: float) -> None:
        """Raise NotQuantisedError unless the trainer, after its first tokens, has computed in FP8 where it should."""
        if self.training is not None and num_tokens and not self.is_checked:
            self.training.assert_quantised(trained=True)
            self.is_checked = True

    def measure_kv_scales(self) -> KvScales | None:
        """The scales of an FP8 KV cache for the tokens trained on (collective)."""
        return self.kv_observer.take(self.ranks) if self.kv_observer is not None else None

    def check_agreement(self, mismatch: MismatchSums) -> dict[str, float]:
        """The `mismatch/...` metrics over all ranks' tokens; EngineMismatchError above the limit (collective)."""
        metrics = mismatch.over(self.ranks).metrics()
        check_agreement(metrics, self.config.precision.max_token_mult_prob_error, self.layers_path)
        return metrics


def check_agreement(metrics: Mapping[str, float], limit: float, layers_path: Path) -> None:
    """Raise EngineMismatchError if training and generation disagree by more than `limit`, or by NaN."""
    error = metrics.get("mismatch/bulk_error")
    if error is None or error <= limit:
        return
    raise EngineMismatchError(
        f"token_mult_prob_error is {error:.4f} without the largest thousandth of the tokens "
        f"(KL {metrics['mismatch/kl']:.4f} nats per token): training and generation disagree by more than "
        f"precision.max_token_mult_prob_error = {limit:g}. Lower precision.max_kl, so that more "
        "layers stay in BF16, or use the same precision for both. The calibration measured:\n"
        f"{layer_table(layers_path)}"
    )


def layer_table(layers_path: Path) -> str:
    """A table, as text, of the layers that change the model's output most when each alone is in FP8."""
    rows = sorted(read_table(layers_path).to_pylist(), key=lambda row: -row["kl_alone"])
    lines = [f"{'layer':24} {'precision':9} {'KL alone':>10}"]
    lines += [f"{row['name']:24} {row['precision']:9} {row['kl_alone']:10.2e}" for row in rows[:MOST_ROWS]]
    return "\n".join([*lines, f"... {len(rows) - MOST_ROWS} more in {layers_path}"] if len(rows) > MOST_ROWS else lines)
