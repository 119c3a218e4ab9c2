"""`specrl bench rollouts`: measure, then write the rows and the page."""

from __future__ import annotations

import time

from specrl.bench.job import BenchJob
from specrl.bench.pages import write_rows
from specrl.bench.rollouts.cells import measure_all, profile, roofline
from specrl.bench.rollouts.engines import Engines, stored_responses
from specrl.bench.rollouts.page import RolloutFindings, write_page
from specrl.bench.rollouts.workloads import pool, workloads
from specrl.bench.settings import TAIL, TAIL_SIZE, RolloutSettings
from specrl.data.prompts import PromptSource
from specrl.distributed import join, leave
from specrl.models.sources import load_tokenizer

PILOT_BATCH = 4
"""The batch size at which the eager and the compiled engine of a draft method are compared."""
PILOT_ROUNDS = 3
"""The number of rounds of that comparison."""


def main(job: BenchJob) -> None:
    """Measure every variant on every workload, and write the rows and the page."""
    started = time.monotonic()
    ranks = join()
    settings, subject = RolloutSettings.model_validate(job.settings), job.subject
    engines = Engines(subject, settings)
    job.check_taken(engines.configs)
    tokenizer, problems_dir = load_tokenizer(subject.policy_dir), subject.config.problems_dir
    source = PromptSource(subject.config, tokenizer, problems_dir=problems_dir)
    prompts = source.held_out(min(TAIL_SIZE, subject.config.validate_.num_prompts))
    requests = pool(prompts, subject.config)
    plain = engines.plain_variants[0].engine
    answers = plain.generate(requests).responses
    lengths = {request.seed: len(answer.tokens) for request, answer in zip(requests, answers, strict=True)}
    job.folder.mkdir(parents=True, exist_ok=True)
    engines.add_default(lengths, ranks.local_rank, job.folder)
    loads = workloads(requests, answers, settings.batches, settings.repeats, settings.max_tokens)
    pilot = workloads(requests, answers, [PILOT_BATCH], PILOT_ROUNDS, settings.max_tokens)[0]
    engines.add_methods(pilot, stored_responses(plain, pool(prompts, subject.config, "bench replay")))
    cells = measure_all(engines, loads)
    found = RolloutFindings(
        cells=cells,
        profiles=[profile(engines, load) for load in loads if load.name != TAIL and engines.profiled is not None],
        roofline=roofline(subject, ranks.device),
        middle_k=engines.middle_k,
        seconds=time.monotonic() - started,
    )
    write_rows(job.json_path, [cell.row() for cell in cells])
    write_page(job, settings, found)
    engines.shutdown()
    leave()
