"""Figures of the calibration, drawn without a display."""

from __future__ import annotations

from matplotlib.figure import Figure

from specrl.training.calibration.calibration import Calibration, LayerRow


def plot_errors(rows: list[LayerRow]) -> Figure:
    """Relative output error of each linear layer in FP8; rings are the layers kept in BF16."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for linear in dict.fromkeys(row.name.rpartition(".")[2] for row in rows):
        own = [row for row in rows if row.name.endswith(linear)]
        layers = [int(row.name.split(".")[1]) for row in own]
        (line,) = axes.plot(layers, [100 * row.relative_error for row in own], marker=".", label=linear)
        kept = [
            (layer, 100 * row.relative_error) for layer, row in zip(layers, own, strict=True) if row.precision == "bf16"
        ]
        if kept:
            axes.plot(*zip(*kept, strict=True), "o", markersize=9, fillstyle="none", color=line.get_color())
    axes.set(xlabel="layer", ylabel="relative error of the output, %", title="FP8 error by layer (ring: kept in BF16)")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def plot_kl(found: Calibration, max_kl: float) -> Figure:
    """Divergence of the model's output against the number of layers in BF16, in the order of the ranking."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    counts, values = zip(*found.curve, strict=True)
    axes.plot(counts, values, marker="o", label="prompts of the choice")
    points = ([0, len(found.bf16_layers)], [found.kl_all_fp8, found.kl_chosen])
    axes.plot(*points, "s", fillstyle="none", label="held-out prompts")
    axes.axhline(max_kl, linestyle="--", color="gray", label="precision.max_kl")
    axes.set_yscale("symlog", linthresh=max_kl / 10)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="linear layers in BF16", ylabel="KL(bf16 || fp8), nats per token", title="FP8 divergence")
    axes.legend()
    return figure
