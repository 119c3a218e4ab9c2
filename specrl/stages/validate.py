"""Stage `validate`: accuracy before and after on held-out prompts, and the speedup as matched pairs."""

from __future__ import annotations

import time
from statistics import fmean

from specrl.artifacts import PrepareResult, SpeedPair, TrainResult, ValidateResult, write_result
from specrl.config import Config
from specrl.data.models import load_tokenizer
from specrl.data.problems import derive_seed
from specrl.data.prompts import Prompt, PromptSource
from specrl.data.rewards import make_reward
from specrl.distributed import Ranks, join, leave
from specrl.matched import matched_pair
from specrl.progress import Progress
from specrl.rollout.acceptance import SpeculationStats
from specrl.rollout.collect import Origin, collect, make_request
from specrl.rollout.engine import Engine
from specrl.rollout.refit import read_weights
from specrl.stages.context import StageContext
from specrl.tracking import Tracker, stage_run


def main(context: StageContext) -> None:
    started = time.monotonic()
    ranks = join()
    config = context.config
    prepared, trained = context.input("prepare", PrepareResult), context.input("train", TrainResult)
    with stage_run(context, ranks) as tracker, Progress(context.stage_dir, enabled=ranks.is_first) as progress:
        source = PromptSource(config, load_tokenizer(prepared.policy_dir))
        engine = Engine(trained.policy_dir, trained.drafter_dir, config=config, seed=config.seed)
        prompts = source.held_out(config.validate_.num_prompts)
        after, stats = accuracy(engine, prompts, config, ranks, progress, "accuracy after")
        speed = measure_speed(engine, prompts, config, progress) if engine.speculates else []
        engine.refit(read_weights(prepared.policy_dir), None, version=0)
        before, _ = accuracy(engine, prompts, config, ranks, progress, "accuracy before")
        if ranks.is_first:
            result = ValidateResult(
                accuracy_before=before,
                accuracy_after=after,
                num_prompts=len(prompts),
                acceptance_length=stats.acceptance_length,
                acceptance_rate_per_pos=list(stats.acceptance_rate_per_pos),
                speed=speed,
                seconds=time.monotonic() - started,
            )
            log(tracker, result)
            write_result(context.stage_dir, result)
        engine.shutdown()
    leave()


def accuracy(
    engine: Engine, prompts: list[Prompt], config: Config, ranks: Ranks, progress: Progress, phase: str
) -> tuple[float, SpeculationStats]:
    """Mean reward of one response to each held-out prompt, with the same seeds whatever the policy; collective.

    Speculation changes no response (invariant 1), so that accuracy with and without it is one number.
    """
    size = config.engine.tensor_parallel
    own = prompts[ranks.rank // size :: ranks.world_size // size]
    origin = Origin(derive_seed(config.seed, "validate"), step=0, rank=ranks.rank)
    rollouts, generation = collect(
        engine,
        own,
        1,
        config,
        make_reward(config.data),
        origin,
        lambda done, total: progress.update(done, total, unit="response", phase=phase),
    )
    shares = ranks.gather(([rollout.reward for rollout in rollouts], generation.stats))[::size]
    return fmean(reward for rewards, _ in shares for reward in rewards), SpeculationStats.merge(s for _, s in shares)


def measure_speed(engine: Engine, prompts: list[Prompt], config: Config, progress: Progress) -> list[SpeedPair]:
    """One matched pair per batch size of `validate.speed_batches`."""
    origin = Origin(derive_seed(config.seed, "speed"), step=0)
    pairs: list[SpeedPair] = []
    for batch in config.validate_.speed_batches:
        progress.update(len(pairs), len(config.validate_.speed_batches), phase=f"speed at batch {batch}")
        count = max(batch, config.validate_.speed_prompts)
        # A batch larger than the held-out set asks the same prompts again, with other seeds.
        requests = [make_request(prompts[i % len(prompts)], i // len(prompts), config, origin) for i in range(count)]
        pairs.append(matched_pair(engine, requests, batch, config.speculation.k, config.validate_.speed_repeats))
    return pairs


def log(tracker: Tracker, result: ValidateResult) -> None:
    metrics = {
        "validate/accuracy_before": result.accuracy_before,
        "validate/accuracy_after": result.accuracy_after,
        "validate/acceptance_length": result.acceptance_length,
    }
    metrics |= {f"speedup/generation_batch_{pair.batch}": pair.speedup for pair in result.speed}
    tracker.log_run_metrics(metrics)
