"""The memory available to a rank in each stage, and the items that must fit into it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specrl.config import Config, StageName
from specrl.config.rollout import ALONE_FRACTION
from specrl.models.shapes import ModelShape
from specrl.projection import memory
from specrl.projection.memory import MemoryItem, Rank
from specrl.projection.traffic import MEAN_FILL

_TRAINER_FIX = (
    "raise policy.tensor_parallel, lower policy.tokens_per_micro_batch or model.max_length, "
    "set policy.recompute=true, lower engine.gpu_memory_fraction or drafter.max_tokens_per_window (pretrain)"
)
_ENGINE_FIX = "raise engine.gpu_memory_fraction or engine.tensor_parallel"


@dataclass(frozen=True)
class Budget:
    """One kind of memory of a rank in a stage, and the items that must fit into it."""

    stage: StageName
    place: str  # `host`, `GPU, engine` or `GPU, trainer`
    available_gib: float
    items: tuple[MemoryItem, ...]
    fix: str  # what to change if the items do not fit

    @property
    def needed_gib(self) -> float:
        return memory.peak_gib(self.items)


def rank_of(config: Config, stage: StageName, shape: ModelShape) -> Rank:
    asked = config.resources_of(stage)
    shards = config.policy.tensor_parallel * config.policy.pipeline_parallel
    return Rank(shape, config, asked.gpus_per_rank, max(asked.ranks // shards, 1), stage)


def stage_budgets(rank: Rank) -> list[Budget]:
    stage, asked = rank.stage, rank.config.resources_of(rank.stage)
    trainer, engine = _trainer_items(rank), memory.engine_items(rank)
    if stage == "train" and rank.route_bytes:
        tokens = max(_kv_given(rank), 0.0) / memory.kv_bytes_per_token(rank)
        how = f"{tokens * memory.GIB:.0f} tokens of the KV cache x {rank.route_bytes} B"
        trainer.append(MemoryItem("experts of cached tokens", tokens * rank.route_bytes, how))
    host = [MemoryItem("Python and libraries", memory.HOST_RUNTIME_GIB[rank.gpu], "one process")]
    if stage == "train":
        host += memory.copy_items(rank)
    if not rank.gpu:
        kv = [_kv_item(rank, _kv_given(rank))] if engine else []
        items = (*trainer, *engine, *kv, *host)
        fix = "raise resources.memory_gib_per_rank, lower policy.tokens_per_micro_batch or engine.kv_cache_gib"
        return [Budget(stage, "host", asked.memory_gib_per_rank, items, fix)]
    share = _engine_share(rank) if engine else 0.0
    trainer.append(MemoryItem("CUDA context, fragments", memory.DEVICE_RUNTIME_GIB, "constant"))
    if asked.ranks > 1:
        trainer.append(MemoryItem("NCCL's communicators", memory.COMMUNICATORS_GIB, "assumed"))
    # The engine is shut down before the drafter is pretrained.
    left = asked.gpu_memory_gib - (share if stage != "pretrain" else 0.0)
    if stage == "train" and rank.config.engine.sleep:
        graphs = sum(item.gib for item in engine if item.name == memory.GRAPHS)
        asleep = sum(item.gib for item in engine if item.phase is None) - graphs
        # torch rounds each pinned allocation up to a power of two, and keeps it after the engine has woken up.
        host.append(MemoryItem("weights of the sleeping engine", 2 * asleep, "engine.sleep, up to twice in size"))
        trainer.append(MemoryItem(memory.GRAPHS, graphs, "they stay while it sleeps"))
        # While the engine is awake, the trainer's resident items share the GPU with it; later the trainer has all of
        # it.
        for name, phase in (("engine, awake", "generation"), ("engine, awake again", "refit")):
            trainer.append(MemoryItem(name, share - graphs, "engine.gpu_memory_fraction", phase))
        if rank.config.bubbles.trains_drafter:  # while other ranks generate
            trainer += [replace(item, phase="generation") for item in trainer if item.phase == "drafter"]
        left = asked.gpu_memory_gib
    budgets = [
        Budget(stage, "GPU, trainer", left, tuple(trainer), _TRAINER_FIX),
        Budget(stage, "host", asked.memory_gib_per_rank, tuple(host), "raise resources.memory_gib_per_rank"),
    ]
    if engine:
        items = (*engine, _kv_item(rank, max(_kv_given(rank), 0.0)))
        budgets.insert(0, Budget(stage, "GPU, engine", share, items, _ENGINE_FIX))
    return budgets


def _trainer_items(rank: Rank) -> list[MemoryItem]:
    stage, config = rank.stage, rank.config
    drafts = config.speculation.draft_method.has_weights
    if stage == "prepare":
        return memory.policy_items(rank, trainable=True) if config.warm_start.num_examples else []
    if stage == "pretrain" and drafts:
        prompts = config.drafter.num_prompts + (config.drafter.data_prompts if config.drafter.data else 0)
        responses = prompts * config.drafter.samples_per_prompt
        drafter = memory.drafter_items(rank, responses=responses)
        return memory.policy_items(rank, trainable=False) + drafter
    if stage == "calibrate":
        return memory.calibration_items(rank)
    if stage == "train":
        fp8 = config.precision.training == "fp8"
        responses = config.train.prompts_per_step * config.train.samples_per_prompt
        drafter = memory.drafter_items(rank, responses=responses) if drafts else []
        policy = [*memory.policy_items(rank, trainable=True, fp8=fp8), *memory.teacher_items(rank)]
        return [*policy, memory.refit_item(rank), *drafter]
    return []


def _kv_given(rank: Rank) -> float:
    if not rank.gpu:
        return rank.config.engine.kv_cache_gib
    # Negative if weights and workspace exceed the engine's share.
    return _engine_share(rank) - sum(item.gib for item in memory.engine_items(rank))


def _engine_share(rank: Rank) -> float:
    fraction = rank.config.engine.gpu_memory_fraction
    if rank.stage != "train":
        fraction = max(fraction, ALONE_FRACTION)
    return rank.config.resources_of(rank.stage).gpu_memory_gib * fraction


def _kv_item(rank: Rank, given_gib: float) -> MemoryItem:
    per_token = memory.kv_bytes_per_token(rank)
    wanted = rank.config.engine.max_num_seqs * rank.config.model.max_length * per_token / memory.GIB
    sequences = f"{rank.config.engine.max_num_seqs} x {rank.config.model.max_length} tokens"
    return MemoryItem("KV cache", given_gib, f"given; {sequences} x {per_token / 1024:.1f} KiB would take {wanted:.1f}")


def check_kv(rank: Rank) -> tuple[str, str]:
    """Return a problem if not one sequence fits the KV cache, and a note if the expected number does not."""
    if not memory.engine_items(rank):
        return "", ""
    config, given = rank.config, _kv_given(rank)
    longest = config.model.max_length * memory.kv_bytes_per_token(rank) / memory.GIB
    key = "engine.gpu_memory_fraction" if rank.gpu else "engine.kv_cache_gib"
    if given < longest:
        line = f"one sequence of model.max_length = {config.model.max_length} needs {longest:.3g} GiB"
        return f"{rank.stage}: KV cache of {max(given, 0.0):.3g} GiB, {line}: raise {key}", ""
    fits, most = given / longest, config.engine.max_num_seqs
    if rank.stage != "train" or fits >= MEAN_FILL * most:  # one note suffices, for the stage that generates most
        return "", ""
    return "", (
        f"the KV cache holds {int(fits)} sequences of full length, engine.max_num_seqs = {most}: vLLM preempts the "
        f"others where the mean is above {fits / most:.0%} of model.max_length; raise {key} to hold more"
    )


def overflow(budget: Budget) -> str:
    largest = sorted(budget.items, key=lambda item: item.gib, reverse=True)[:3]
    names = ", ".join(f"{item.name} {item.gib:.1f}" for item in largest)
    return (
        f"{budget.stage}: a rank needs {budget.needed_gib:.1f} GiB ({budget.place}) and has "
        f"{budget.available_gib:.1f} ({names}): {budget.fix}"
    )
