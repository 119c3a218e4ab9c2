"""The gate that stops a run when training and generation no longer agree about the probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

MOST_ROWS = 12
"""The largest number of layers that an error message lists."""


class EngineMismatchError(RuntimeError):
    """Training and generation disagree by more than the run allows."""


def check_agreement(metrics: Mapping[str, float], limit: float, layers_path: Path) -> None:
    """Raise EngineMismatchError if training and generation disagree by more than `limit`, or NaN.

    Without `mismatch/bulk_error` nothing was trained on, and there is nothing to check.
    """
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
    """As text, a table of the layers that change the model's output most when they alone are in FP8."""
    with pa.ipc.open_file(str(layers_path)) as reader:
        rows = reader.read_all().to_pylist()
    rows.sort(key=lambda row: -row["kl_alone"])
    lines = [f"{'layer':24} {'precision':9} {'error':>7} {'KL alone':>10} {'amax':>9}"]
    lines += [
        f"{row['name']:24} {row['precision']:9} {row['relative_error']:7.2%} {row['kl_alone']:10.2e} "
        f"{row['activation_amax_max']:9.3g}"
        for row in rows[:MOST_ROWS]
    ]
    return "\n".join([*lines, f"... {len(rows) - MOST_ROWS} more in {layers_path}"] if len(rows) > MOST_ROWS else lines)
