"""The page of `specrl bench agreement`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specrl.bench.agreement.comparison import NAMES, EnginePair
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.settings import AgreementSettings
from specrl.bench.tables import markdown_table, spread
from specrl.precision.recipe import Recipe

METRICS = (
    ("token_mult_prob_error", ".4f"),
    ("bulk_error", ".4f"),
    ("kl", ".5f"),
    ("js", ".5f"),
    ("importance_ratio_p99", ".3f"),
)
"""The metrics in the order of the table's columns, each with its format."""
LEGEND = """
Figures are means over the seeds, the least and the greatest in brackets. *error* is token_mult_prob_error, the mean
over the sampled tokens of exp(|log p_training - log p_generation|); *bulk* leaves out the largest thousandth of them.
*p99* is the 99th percentile of the importance ratio p_training / p_generation.
"""


def write_page(job: BenchJob, settings: AgreementSettings, recipe: Recipe, pairs: Sequence[EnginePair]) -> None:
    """Write the page."""
    page = Page(job.page)
    page.text(heading("agreement of the two engines by precision", job.command, torch.get_num_threads()))
    page.text(
        f"Run `{job.run_dir.name}`, its policy before RL; {settings.num_prompts} held-out prompts, "
        f"{settings.samples_per_prompt} responses to each; seeds {', '.join(map(str, settings.seeds))}. FP8: "
        f"{len(recipe.fp8_layers)} of {len(recipe.fp8_layers) + len(recipe.bf16_layers)} linear layers, as calibrated."
    )
    lines = []
    for key, name in NAMES.items():
        own = [pair for pair in pairs if (pair.generation, pair.training) == key]
        columns = [spread([pair.metrics[f"mismatch/{metric}"] for pair in own], form) for metric, form in METRICS]
        lines.append([name, str(sum(pair.tokens for pair in own)), *columns])
    page.text(markdown_table(("precision", ">tokens", ">error", ">bulk", ">KL, nats/token", ">JS", ">p99"), lines))
    page.text(LEGEND)
    page.text(order(pairs))
    page.write()


def order(pairs: Sequence[EnginePair]) -> str:
    """Return in words for how many seeds BF16 < FP8 both < FP8 generation only, by each measure of disagreement."""
    names = ("BF16", "FP8 both", "FP8 generation only")
    seeds = sorted({pair.seed for pair in pairs})
    counts = []
    for measure, word in (("token_mult_prob_error", "error"), ("bulk_error", "bulk"), ("kl", "KL"), ("js", "JS")):
        found = {
            (NAMES[pair.generation, pair.training], pair.seed): pair.metrics[f"mismatch/{measure}"] for pair in pairs
        }
        rows = ([found[name, seed] for name in names] for seed in seeds)
        counts.append(f"{word} {sum(low < middle < high for low, middle, high in rows)} of {len(seeds)}")
    return f"Seeds for which the published order holds, BF16 < FP8 both < FP8 generation only: {', '.join(counts)}."
