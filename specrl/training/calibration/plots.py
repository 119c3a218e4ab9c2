"""Figures of the calibration, drawn without a display."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from specrl.report.plots import COLOURS, MARKERS
from specrl.training.calibration.calibration import Calibration, LayerRow


def plot_errors(rows: list[LayerRow]) -> Figure:
    """Draw the relative output error of each linear layer in FP8, with a ring around the layers kept in BF16."""
    figure, axes = _figure()
    for linear in dict.fromkeys(row.name.rpartition(".")[2] for row in rows):
        own = [row for row in rows if row.name.endswith(linear)]
        layers = [int(row.name.split(".")[1]) for row in own]
        errors = [100 * row.relative_error for row in own]
        (line,) = axes.plot(layers, errors, label=linear)
        kept = [place for place, row in enumerate(own) if row.precision == "bf16"]
        if kept:
            ringed = [layers[place] for place in kept], [errors[place] for place in kept]
            axes.plot(ringed[0], ringed[1], "o", markersize=11, fillstyle="none", color=line.get_color())
    axes.set(xlabel="layer", ylabel="relative error of the output, %", title="FP8 error by layer (ring: kept in BF16)")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right center", frameon=False)
    return figure


def plot_kl(found: Calibration, max_kl: float) -> Figure:
    """Draw the divergence of the model's output by the number of layers in BF16, in the order of the ranking."""
    figure, axes = _figure()
    counts, values = zip(*found.curve, strict=True)
    axes.plot(counts, values, label="prompts of the choice")
    held_out = [found.kl_all_fp8, found.kl_chosen]
    axes.plot([0, len(found.bf16_layers)], held_out, linestyle="none", fillstyle="none", label="held-out prompts")
    axes.axhline(max_kl, linestyle="--", color="gray", label="precision.max_kl")
    axes.set_yscale("symlog", linthresh=max_kl / 10)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="linear layers in BF16", ylabel="KL(bf16 || fp8), nats per token", title="FP8 divergence")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    return figure


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=COLOURS, marker=list(MARKERS))
    return figure, axes
