"""The checks of precision in each step: FP8 is on where it should be, the KV cache has scales, the engines agree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from specrl.config import Config
from specrl.distributed import Ranks
from specrl.precision.kv_scales import KvObserver
from specrl.precision.mismatch import MismatchSums
from specrl.precision.recipe import KvScales, Mode
from specrl.rollout.engine import Engine
from specrl.training.megatron.fp8 import LinearPrecision

MOST_ROWS = 12


class EngineMismatchError(RuntimeError):
    """Training and generation disagree by more than the run allows."""


class PrecisionMonitor:
    """Checks and measures the precision of one rank's engine and trainer, step by step."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        generation: Engine,
        training: LinearPrecision | None,
        kv_observer: KvObserver | None,
        layers_path: Path,
    ) -> None:
        """`training` and `kv_observer` are None where the trainer's layers and the KV cache are not in FP8."""
        self._config, self._ranks = config, ranks
        self._generation, self._training, self._kv_observer = generation, training, kv_observer
        self._layers_path = layers_path
        self._is_checked = False

    @property
    def training_mode(self) -> Mode:
        return self._training.mode if self._training is not None else "off"

    def check_engine(self) -> None:
        """Raise NotQuantisedError unless the engine has computed in FP8 where it should since the last refit."""
        self._generation.assert_quantised()

    def check_trainer(self, num_tokens: float) -> None:
        """Raise NotQuantisedError unless the trainer, once it has computed, has done so in FP8 where it should."""
        if self._training is not None and num_tokens and not self._is_checked:
            self._training.assert_quantised(trained=True)
            self._is_checked = True

    def measure_kv_scales(self) -> KvScales | None:
        """The scales of an FP8 KV cache for the tokens trained on (collective)."""
        return self._kv_observer.take(self._ranks) if self._kv_observer is not None else None

    def check_agreement(self, mismatch: MismatchSums) -> dict[str, float]:
        """The `mismatch/...` metrics over all ranks' tokens; EngineMismatchError above the limit (collective)."""
        metrics = mismatch.over(self._ranks).metrics()
        check_agreement(metrics, self._config.precision.max_token_mult_prob_error, self._layers_path)
        return metrics


def check_agreement(metrics: Mapping[str, float], limit: float, layers_path: Path) -> None:
    """Raise EngineMismatchError if training and generation disagree by more than `limit`, or NaN."""
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
    """A table, as text, of the layers that change the model's output most when they alone are in FP8."""
    with pa.ipc.open_file(str(layers_path)) as reader:
        rows = reader.read_all().to_pylist()
    rows.sort(key=lambda row: -row["kl_alone"])
    lines = [f"{'layer':24} {'precision':9} {'KL alone':>10}"]
    lines += [f"{row['name']:24} {row['precision']:9} {row['kl_alone']:10.2e}" for row in rows[:MOST_ROWS]]
    return "\n".join([*lines, f"... {len(rows) - MOST_ROWS} more in {layers_path}"] if len(rows) > MOST_ROWS else lines)
