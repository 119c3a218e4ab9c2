"""Stage `validate`: accuracy before and after training, exactness of speculation, and speedups as matched pairs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from statistics import median

from specrl import logs
from specrl.artifacts import (
    ExactnessResult,
    PrepareResult,
    SetScore,
    SpeedPair,
    TrainResult,
    ValidateResult,
    write_result,
)
from specrl.config import Config
from specrl.context import StageContext
from specrl.data.problems import Prompt, derive_seed
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import RewardPool, start_rewards
from specrl.distributed import Ranks
from specrl.models.sources import load_tokenizer
from specrl.progress import Progress
from specrl.rollout.collect import Origin, make_request
from specrl.rollout.conversations import open_conversations
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine, Request, start_engine
from specrl.rollout.vllm.weights.load import read_weights
from specrl.stages.rank import stage_rank
from specrl.tracking.tracker import Tracker
from specrl.validation.answering import HeldOutSet, answer, held_out_sets
from specrl.validation.exactness import check, exactness_metrics, measure_exactness
from specrl.validation.speed import NextStep, matched_pair


def main(context: StageContext) -> None:
    started = time.monotonic()
    config = context.config
    prepared, trained = context.input("prepare", PrepareResult), context.input("train", TrainResult)
    with stage_rank(context) as (ranks, tracker, progress):
        rewards = start_rewards(config, ranks.rank, config.validate_.held_out_sets)
        source = PromptSource(config, load_tokenizer(prepared.policy_dir), prompts_dir=context.prompts_dir)
        with logs.phase("start of the engine"):
            engine = start_engine(config, trained.policy_dir, trained.drafter_dir)
        sets, prompts = held_out_sets(config, source), source.held_out(config.validate_.num_prompts)
        engine.set_k(engine.longest_k)  # acceptance is reported at full draft length
        after, stats = answer_all(engine, rewards, sets, trained.policy_step, ranks, progress, "accuracy after")
        exactness = check_exactness(engine, prompts, rewards, config, tracker, progress) if engine.speculates else None
        following = NextStep.read(context.inputs["train"], trained.policy_step, config, source)
        speed = measure_speed(engine, following.opened(engine, config, rewards), config, progress)
        engine.refit(read_weights(prepared.policy_dir), None)
        before, _ = answer_all(engine, rewards, sets, 0, ranks, progress, "accuracy before")
        if ranks.is_first:
            result = ValidateResult(
                accuracy_before=before[0].accuracy,
                accuracy_after=after[0].accuracy,
                num_prompts=after[0].num_prompts,
                before=before,
                after=after,
                acceptance_length=stats.acceptance_length,
                acceptance_rate_per_pos=list(stats.acceptance_rate_per_pos),
                speed=speed,
                text=following.text() if speed and config.speculation.draft_method.replays else None,
                exactness=exactness,
                seconds=time.monotonic() - started,
            )
            log(tracker, result, trained.timing_share)
            write_result(context.stage_dir, result)
        engine.shutdown()
        if rewards is not None:
            rewards.close()


def answer_all(
    engine: Engine,
    rewards: RewardPool | None,
    sets: list[HeldOutSet],
    step: int,
    ranks: Ranks,
    progress: Progress,
    phase: str,
) -> tuple[list[SetScore], SpeculationStats]:
    """The scores of the engine's policy on all sets, and the draft counters of the first (collective)."""
    found = []
    with logs.phase(phase):
        for chosen in sets:
            on_progress = partial(progress.update, unit="response", phase=f"{phase}, {chosen.name}")
            found.append(answer(engine, rewards, chosen, step, ranks, on_progress))
    return [score for score, _ in found], found[0][1]


def check_exactness(
    engine: Engine,
    prompts: list[Prompt],
    rewards: RewardPool | None,
    config: Config,
    tracker: Tracker,
    progress: Progress,
) -> ExactnessResult:
    """Compare speculative with plain decoding on the final policy; log the figures, then raise any ExactnessError."""
    progress.update(0, 1, phase="exactness")
    requests = exactness_requests(engine, prompts, rewards, config)
    with logs.phase("exactness"):
        measured = measure_exactness(engine, requests, engine.longest_k)
    tracker.log_metrics(exactness_metrics(measured))
    tracker.flush()
    check(measured)
    progress.update(1, 1, phase="exactness")
    return measured


def exactness_requests(
    engine: Engine, prompts: list[Prompt], rewards: RewardPool | None, config: Config
) -> list[Request]:
    """The requests for the exactness check; of conversations, only the first turns (collective)."""
    origin = Origin(derive_seed(config.seed, "exactness"), step=0)
    opened = open_conversations(engine, prompts[: config.validate_.exactness_prompts], config, rewards)
    return [make_request(prompt, 0, config, origin) for prompt in opened]


def measure_speed(engine: Engine, following: NextStep, config: Config, progress: Progress) -> list[SpeedPair]:
    """Measure one matched pair per `validate.speed_batches`, on the training step that would come next (collective)."""
    if not engine.speculates:
        return []
    settings = config.validate_
    give_texts = partial(following.give_texts, engine) if config.speculation.draft_method.replays else None
    k = None if config.speculation.adaptive else engine.longest_k
    pairs: list[SpeedPair] = []
    for batch in settings.speed_batches:
        progress.update(len(pairs), len(settings.speed_batches), phase=f"speed at batch {batch}")
        requests = following.requests(max(batch, settings.speed_prompts), config)
        with logs.phase(f"speed at batch {batch}"):
            pairs.append(matched_pair(engine, requests, batch, k, settings.speed_repeats, give_texts))
    return pairs


def step_speedup(generation: float, shares: Mapping[str, float]) -> float:
    """The speedup of a whole step, from that of generation and the shares of its parts.

    Plain decoding has no drafter to train; validations are excluded.
    """
    step = 1 - shares.get("validation", 0.0)
    plain = step + (generation - 1) * shares["generation"] - shares.get("drafter_update", 0.0)
    return plain / step


def log(tracker: Tracker, result: ValidateResult, shares: Mapping[str, float]) -> None:
    """Log the result's figures to MLflow; `shares` are the shares of a training step's parts."""
    metrics = {
        "validate/accuracy_before": result.accuracy_before,
        "validate/accuracy_after": result.accuracy_after,
        "validate/acceptance_length": result.acceptance_length,
    }
    if result.speed:
        metrics["speedup/generation"] = median(pair.speedup for pair in result.speed)
        metrics["speedup/step"] = step_speedup(metrics["speedup/generation"], shares)
    metrics |= {f"speedup/generation_batch_{pair.batch}": pair.speedup for pair in result.speed}
    for pair in result.speed:
        sources = pair.token_share.items()
        metrics |= {f"validate/{source}_token_share_batch_{pair.batch}": share for source, share in sources}
    tracker.log_metrics(metrics)
