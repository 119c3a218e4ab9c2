"""`specrl bench agreement`: how far the two engines agree about the same tokens of the same policy, by their precision.

Each engine samples with each seed, and each trainer scores what it sampled; nothing is trained, so that all pairs see
equal weights. What disagreement does to learning is what `specrl bench precision` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specrl.artifacts import CalibrateResult
from specrl.bench.job import BenchJob
from specrl.bench.lineup import say
from specrl.bench.pages import Page, heading, write_rows
from specrl.bench.report_precision import spread
from specrl.bench.settings import AgreementSettings
from specrl.bench.subject import Subject, find_subject
from specrl.bench.tables import markdown_table
from specrl.config import Config, ConfigError, PrecisionConfig, SpeculationConfig
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks, join, leave
from specrl.models.sources import load_tokenizer
from specrl.precision.mismatch import mismatch_metrics
from specrl.precision.recipe import Recipe, load_recipe
from specrl.report.results import find_stages, finished
from specrl.rollout.collect import Origin, collect
from specrl.rollout.engine import Engine
from specrl.schemas import Rollout
from specrl.stages.train import check_precision, training_precision
from specrl.training.batches import TokenSequence, pack
from specrl.training.megatron.policy import Policy

PRECISIONS = ("bf16", "fp8")
NAMES = {
    ("bf16", "bf16"): "BF16",
    ("fp8", "fp8"): "FP8 both",
    ("fp8", "bf16"): "FP8 generation only",
    ("bf16", "fp8"): "FP8 training only",
}
ERROR = "mismatch/token_mult_prob_error"
METRICS = (
    *(("token_mult_prob_error", ".4f"), ("bulk_error", ".4f"), ("kl", ".5f"), ("js", ".5f")),
    ("importance_ratio_p99", ".3f"),
)
"""Of the page's table, in its order, and how they are written."""
LEGEND = """
Mean over the seeds, least and greatest in brackets. *error*: token_mult_prob_error, the mean over the sampled tokens of
exp(|log p_training - log p_generation|); *bulk*: without the largest thousandth of them. *p99*: of the importance ratio
p_training / p_generation.
"""


@dataclass(frozen=True)
class Pair:
    """An engine and a trainer, on what the engine sampled with one seed."""

    generation: str
    training: str
    seed: int
    tokens: int
    metrics: dict[str, float]

    def row(self) -> dict[str, Any]:
        """As `--json` writes it."""
        who = {"generation": self.generation, "training": self.training, "seed": self.seed, "tokens": self.tokens}
        return who | {name.partition("/")[2]: value for name, value in self.metrics.items()}


def main(job: BenchJob) -> None:
    """
    Raises:
        ConfigError: the run has not calibrated or not trained yet.
        ValueError: this machine cannot compute its policy in FP8.
    """
    settings, subject = AgreementSettings.model_validate(job.settings), find_subject(job.run_dir)
    calibrated = finished(find_stages(job.run_dir), "calibrate", CalibrateResult)
    if calibrated is None:
        raise ConfigError(f"run {job.run_dir.name} has no calibrate; go on with: specrl resume {job.run_dir.name}")
    recipe = load_recipe(calibrated.scales_path, subject.first_policy_dir)
    for precision in PRECISIONS:
        check_precision(with_precision(subject.config, precision), subject.first_policy_dir)
    ranks = join()
    sampled = {precision: sample(subject, precision, recipe, settings) for precision in PRECISIONS}
    pairs = [pair for precision in PRECISIONS for pair in compare(subject, precision, recipe, sampled, ranks)]
    write_rows(job.json_path, [pair.row() for pair in pairs])
    write_page(job, settings, recipe, pairs)
    leave()


def with_precision(config: Config, precision: str) -> Config:
    """The run's configuration with both engines in one precision, decoding plainly: drafts change no log-prob."""
    chosen = config.precision.model_dump() | {"generation": precision, "training": precision, "kv_cache": "bf16"}
    return config.model_copy(
        update={
            "precision": PrecisionConfig.model_validate(chosen),
            "speculation": SpeculationConfig(method="none", k=0),
        }
    )


def sample(subject: Subject, precision: str, recipe: Recipe, settings: AgreementSettings) -> dict[int, list[Rollout]]:
    """Responses to held-out prompts, by seed."""
    config, policy_dir = with_precision(subject.config, precision), subject.first_policy_dir
    prompts = PromptSource(config, load_tokenizer(policy_dir)).held_out(settings.num_prompts)
    own = recipe if precision == "fp8" else None
    engine = Engine(policy_dir, None, config=config, seed=config.seed, recipe=own, speculate=False)
    found = {}
    for seed in settings.seeds:
        origin = Origin(seed, step=0)
        found[seed] = collect(engine, prompts, settings.samples_per_prompt, config, lambda *_: 0.0, origin)[0]
    engine.assert_quantised()
    say(f"sampled with the engine in {precision}, FP8 {engine.mode}")
    engine.shutdown()
    return found


def compare(
    subject: Subject, precision: str, recipe: Recipe, sampled: dict[str, dict[int, list[Rollout]]], ranks: Ranks
) -> list[Pair]:
    """A trainer in `precision` against each engine."""
    config = with_precision(subject.config, precision)
    linears = training_precision(config, recipe)
    policy = Policy(
        subject.first_policy_dir, config.policy, dtype=config.model.dtype, ranks=ranks, seed=config.seed, fp8=linears
    )
    pairs = []
    for generation, by_seed in sampled.items():
        for seed, rollouts in by_seed.items():
            trained = score(policy, rollouts, config)
            generated = torch.tensor([value for rollout in rollouts for value in rollout.generation_logprobs])
            metrics = mismatch_metrics(trained, generated, config.train.importance_cap)
            pairs.append(Pair(generation, precision, seed, len(generated), metrics))
            say(f"{NAMES[generation, precision]}, seed {seed}: error {metrics[ERROR]:.4f}, {len(generated)} tokens")
    if linears is not None:
        linears.assert_quantised()
    return pairs


def score(policy: Policy, rollouts: Sequence[Rollout], config: Config) -> torch.Tensor:
    """The trainer's log-probs of all response tokens, float32 [tokens], in the order of the rollouts; in nats."""
    sequences = [
        TokenSequence.of(rollout.prompt_tokens, rollout.response_tokens, index)
        for index, rollout in enumerate(rollouts)
    ]
    batches = pack(sequences, config.policy.tokens_per_micro_batch, policy.pad_multiple)
    by_index: dict[int, torch.Tensor] = {}
    for batch, logprobs in zip(batches, policy.logprobs(batches, temperature=config.sampling.temperature), strict=True):
        by_index |= {index: logprobs[row][batch.mask[row]].cpu() for row, index in enumerate(batch.indices)}
    return torch.cat([by_index[index] for index in range(len(rollouts))])


def write_page(job: BenchJob, settings: AgreementSettings, recipe: Recipe, pairs: Sequence[Pair]) -> None:
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


def order(pairs: Sequence[Pair]) -> str:
    """For how many seeds BF16 < FP8 both < FP8 generation only, by each measure of disagreement."""
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
