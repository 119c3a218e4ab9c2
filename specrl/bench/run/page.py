"""The page of `specrl bench run`: speedups, costs, rewards and accuracy by step, and where responses part."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from specrl.artifacts import PrepareResult, read_curve
from specrl.bench.interleaved.side import PARTS
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.run.partings import find_partings, rounding_of
from specrl.bench.run.results import Comparison
from specrl.bench.run.settings import RunSettings
from specrl.bench.run.training import pretraining_s
from specrl.bench.tables import Spread, markdown_table
from specrl.bench.uses import PLAIN, parse_use
from specrl.config.methods import METHODS
from specrl.report.plots import line_charts

HOW = """
Every use trains the run's policy before RL, with ranks, an engine and an optimizer of its own, on the same prompts with
the same seeds. They take a step each in turn, in another order in every round; while one works, the others wait. All
ratios are against plain decoding in the same precision, per response token, and above 1 where the use is faster:
*generation* and *step* are medians over the steps, with the least and the greatest ratio of any step; *end to end* is
the whole training, with the start of its ranks, all steps and their validations. The pretraining of the drafter comes
before it and took {pretraining_s:.0f} s in this run. Plain decoding is started last: files that are not cached yet cost
the use that is started first.
"""
COSTS = """
All figures are for response tokens, each of which the policy has accepted. *held* are the hours of the {devices} that
the ranks hold, *busy* those of CPU time that they use. *energy* is that of the whole machine: {energy}.
"""
ENERGY = "{source} during the steps of the use"
NO_ENERGY = "not measured, as this machine has no counter that can be read (RAPL, NVML)"


def write_page(job: BenchJob, settings: RunSettings, found: Sequence[Comparison], energy: str) -> None:
    """Write the page.

    Args:
        energy: The counters of energy in words; empty where this machine has none.
    """
    page = Page(job.page)
    page.text(heading("whole steps and whole trainings", job.command, settings.ranks * settings.threads))
    train = found[0].run.context.config.train
    page.text(
        f"Run `{job.run_dir.name}`, {settings.ranks} rank(s) x {settings.threads} thread(s), {settings.steps} steps "
        f"after {settings.warm_up} without counted times, {train.prompts_per_step} prompts with "
        f"{train.samples_per_prompt} responses; drafter to begin with: {settings.drafter}."
    )
    page.text(HOW.format(pretraining_s=pretraining_s(job.run_dir)))
    page.text(_speedups(found))
    page.text("## Where the time of a step goes\n\n" + _parts(found))
    has_gpus = found[0].run.context.config.resources_of("train").gpus_per_rank
    words = ENERGY.format(source=energy) if energy else NO_ENERGY
    page.text("## Cost\n\n" + _costs(found))
    page.text(COSTS.format(devices="GPUs" if has_gpus else "cores", energy=words))
    page.text("## Rewards")
    page.text(_rewards(found))
    for precision in settings.precisions:
        own = [item for item in found if item.run.precision == precision]
        page.plot(f"reward-{precision}", _reward_chart(own), f"Mean reward by step, {precision}")
        if settings.validate_every:
            page.plot(f"accuracy-{precision}", _accuracy_chart(own), f"Accuracy on held-out prompts, {precision}")
    page.text("## Where responses part")
    page.text(_partings(found))
    page.write()


def _speedups(found: Sequence[Comparison]) -> str:
    lines = []
    for item in found:
        use = parse_use(item.run.name)
        k = item.run.context.config.speculation.k
        cells = (_ratio(item.generation), _ratio(item.step), f"{item.end_to_end:.2f}x")
        same = f"{item.num_same} of {len(item.plain_responses)}"
        lines.append([item.run.precision, item.run.name, use.method, str(k), use.bubbles, *cells, same])
    columns = ("precision", "use", "drafts", ">k", "bubbles", ">generation", ">step", ">end to end")
    return markdown_table((*columns, ">same responses"), lines)


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f}x ({spread.least:.2f} to {spread.greatest:.2f})"


def _parts(found: Sequence[Comparison]) -> str:
    """Return the mean seconds of each part of the counted steps."""
    lines = []
    for item in found:
        steps = item.run.steps[item.warm_up :]
        parts = [fmean(step.seconds(part) for step in steps) for part in PARTS]
        whole = fmean(step.seconds("step") - step.seconds("validation") for step in steps)
        cells = [f"{value:.2f}" for value in (whole, *parts)]
        lines.append([item.run.precision, item.run.name, *cells, f"{item.run.start_s:.1f}"])
    names = [part.replace("_", " ") for part in PARTS]
    return markdown_table(("precision", "use", *(f">{name}, s" for name in ("step", *names, "start"))), lines)


def _costs(found: Sequence[Comparison]) -> str:
    lines = []
    for item in found:
        steps = item.run.steps[item.warm_up :]
        joules = item.joules_per_token
        drafts = METHODS[parse_use(item.run.name).method].drafts
        cells = (
            f"{item.reserved_hours:.2f}",
            f"{item.busy_hours:.2f}",
            f"{joules:.3f}" if joules is not None else "not measured",
            f"{fmean(step.metrics['spec/acceptance_length'] for step in steps):.2f}" if drafts else "-",
            f"{max(step.peak_gib for step in steps):.1f}",
        )
        lines.append([item.run.precision, item.run.name, *cells])
    columns = (">held, hours per million", ">busy, hours per million", ">energy, J per token")
    more = (">acceptance length", ">peak memory of the ranks, GiB")
    return markdown_table(("precision", "use", *columns, *more), lines)


def _rewards(found: Sequence[Comparison]) -> str:
    """Return the paired test of the rewards of each use."""
    lines = []
    for item in found:
        if item.run.name == PLAIN:
            continue
        test = item.reward
        pairs = f"{test.num_different} of {test.num_pairs}"
        lines.append([item.run.precision, item.run.name, f"{test.difference:+.4f}", f"{test.p_value:.2f}", pairs])
    columns = ("precision", "use", ">difference of the mean reward", ">p (random signs)", ">prompts that differ")
    return markdown_table(columns, lines)


def _reward_chart(found: Sequence[Comparison]) -> str:
    series = {
        item.run.name: [(float(step.step), step.metrics["reward/mean"]) for step in item.run.steps] for item in found
    }
    return line_charts(series, "RL step", "mean reward")


def _accuracy_chart(found: Sequence[Comparison]) -> str:
    series = {
        item.run.name: [(float(score.step), score.accuracy) for score in read_curve(item.run.context.stage_dir)]
        for item in found
    }
    return line_charts(series, "RL step", "accuracy")


def _partings(found: Sequence[Comparison]) -> str:
    return "\n".join(f"- {item.run.precision}, {item.run.name}: {_parting(item)}" for item in found if _is_other(item))


def _is_other(item: Comparison) -> bool:
    return item.run.name != PLAIN


def _parting(item: Comparison) -> str:
    """Return in words where the responses of a use part from those of plain decoding, and why."""
    total = len(item.plain_responses)
    if item.tokens_equal:
        return f"all tokens of all {total} responses are equal."
    partings = find_partings(item.plain_responses, item.responses)
    first = min(parting.step for parting in partings)
    of_first = [parting for parting in partings if parting.step == first]
    words = (
        f"{len(partings)} of {total} responses part, the first ones in step {first} "
        f"({len(of_first)}, the earliest at token {min(parting.index for parting in of_first)})."
    )
    if first > 0:
        return f"{words} All responses of the steps before are equal."
    if item.run.precision == "fp8":
        return f"{words} Batches of another shape round differently; from the next step on, the policies differ too."
    context = item.run.context
    policy_dir = context.input("prepare", PrepareResult).policy_dir
    rounding = rounding_of(of_first, policy_dir, context.config.model.dtype, context.config.sampling)
    if not rounding.distances:
        return words
    return (
        f"{words} In that step the policies are the same. There, an edge of the CDF must have moved by at most "
        f"{max(rounding.distances):.2g}; rounding in {context.config.model.dtype} explains up to {rounding.limit:.2g} "
        f"({rounding.num_explained} of {len(rounding.distances)}). From the next step on, the policies differ, as they "
        "were trained on other responses."
    )
