"""The page of `specrl bench step`."""

from __future__ import annotations

from specrl.bench.interleaved.side import PARTS
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.settings import StepSettings
from specrl.bench.step.results import StepFindings
from specrl.bench.tables import markdown_table
from specrl.config import Config

HOW = """
Both trainers begin with the run's policy before RL and take the same prompts in the same order, with the same reward
function, the same number of responses to a prompt, the same longest response and the same number of threads. They run
in processes of their own and take one step each in turn; while one works, the other one waits. Steps before the first
pair below warm both up. No group is left out of the update, there is no reference policy, and neither logs nor writes
checkpoints.

{peer} {version} is set up to be fast on a CPU: activations are kept instead of computed again (its default is to
compute them again), and a forward and backward pass takes {sequences} sequences. {precision} Its responses come from
transformers' `generate`, because both of its vLLM modes need a GPU: one loads weights into layers that vLLM's CPU build
has packed away, the other sends them over NCCL. specrl's step includes the update of the drafter and the checks of the
refit, which {peer} does not have.
"""
PRECISIONS = {
    "mixed": "Its weights and the moments of its optimizer are in FP32 and it computes in BF16, as specrl does.",
    "bf16": "Its weights and the moments of its optimizer are in BF16 alone, where specrl has FP32 ones of both.",
}


def write_page(job: BenchJob, settings: StepSettings, config: Config, found: StepFindings) -> None:
    """Write the page."""
    page = Page(job.page)
    page.text(heading(f"an RL step against {found.peer_name}'s", job.command, settings.threads))
    page.text(
        HOW.format(
            peer=found.peer_name,
            version=found.peer_version,
            sequences=settings.peer_sequences,
            precision=PRECISIONS[settings.peer_precision],
        )
    )
    ratio, ranks = found.ratio, "one rank" if settings.ranks == 1 else f"{settings.ranks} ranks"
    page.text(
        f"**{found.peer_name}'s step takes {ratio.median:.2f} times as long as specrl's** ({ratio.least:.2f} to "
        f"{ratio.greatest:.2f} over {len(found.own)} pairs of steps), with {settings.prompts_per_step} prompts, "
        f"{settings.samples_per_prompt} responses to each of at most {settings.max_response_tokens} tokens, "
        f"speculation.method = {config.speculation.method!r}, and specrl on {ranks}."
    )
    page.text(_parts(found))
    products, update_s = found.products, found.own[-1].seconds("policy_update")
    page.text(
        f"The matrix products of specrl's last update, of {products.tokens} tokens with each prompt counted once, take "
        f"{products.seconds:.2f} s at the {products.flops_per_s / 1e9:.0f} GFLOP/s that this machine reaches with "
        f"{settings.threads} threads on such products: {products.seconds / update_s:.0%} of the update."
    )
    page.text("## Steps\n\n" + _steps(found))
    page.write()


def _parts(found: StepFindings) -> str:
    """Return the table of the parts of a step: medians over the steps."""
    peer = {
        "step": found.peer_median(lambda step: step.step_s),
        "generation": found.peer_median(lambda step: step.generation_s),
        "policy_update": found.peer_median(lambda step: step.update_s),
        "other": found.peer_median(lambda step: step.other_s),
    }
    rows = []
    for part in ("step", *PARTS, "other"):
        own, other = found.own_median(part), peer.get(part)
        cells = (f"{other:.2f}", f"{other / own:.2f}x" if own > 0.01 else "-") if other is not None else ("-", "-")
        rows.append((part.replace("_", " "), f"{own:.2f}", f"{own / found.own_median('step'):.0%}", *cells))
    return markdown_table(("part", ">specrl, s", ">share", f">{found.peer_name}, s", ">ratio"), rows)


def _steps(found: StepFindings) -> str:
    """Return the table of the single steps, with tokens and memory."""
    rows = [
        (
            str(number),
            f"{one.seconds('step'):.1f}",
            f"{other.step_s:.1f}",
            f"{other.step_s / one.seconds('step'):.2f}x",
            str(one.tokens),
            str(other.tokens),
            f"{one.peak_gib:.2f} ({one.held_gib:.2f})",
            f"{other.peak_gib:.2f} ({other.held_gib:.2f})",
        )
        for number, (one, other) in enumerate(zip(found.own, found.peer, strict=True))
    ]
    name = found.peer_name
    columns = ("pair", ">specrl, s", f">{name}, s", ">ratio", ">response tokens, specrl", f">{name}")
    return markdown_table((*columns, ">peak memory (held after), specrl, GiB", f">{name}, GiB"), rows)
