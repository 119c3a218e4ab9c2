"""Policies of every family on layouts of gloo ranks: `python -m tests.integration.policy_worker FOLDER`.

The tests compare what the layouts leave behind. Everything is imported once; ranks are forked from there.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specrl.config import DrafterConfig, PolicyConfig
from specrl.distributed import Ranks, join, leave
from specrl.training import sample as sampling
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.checkpoint import checkpoints as checkpointing
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.load import TrainState, load
from specrl.training.checkpoint.manifest import CheckpointError
from specrl.training.drafter.trainer import Drafter
from specrl.training.megatron import scores
from specrl.training.megatron.policy import Policy
from specrl.training.megatron.scores import MAX_LOGITS
from tests.forks import fork, wait
from tests.traffic import refit_traffic

# isort: split
from megatron.core import parallel_state

VOCABULARY = 97  # odd: two tensor-parallel ranks need padding
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama-untied": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5),
    ),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True, rope_parameters=YARN)),
    "qwen3-untied": (
        Qwen3ForCausalLM,
        Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False, rope_parameters=LINEAR),
    ),
}
LAYERS = (2, 3, 4, 6)
"""With what leaves the last of the 6 layers, from which a drafter computes its targets."""
CONFIG = {"lr": 1e-3, "clip_grad": 0.5}
"""Adam moves a weight by about `lr` however small its gradient is, and near zero its sign is the rounding of a CPU."""


@dataclass(frozen=True)
class Move:
    """A checkpoint of one layout that another one goes on from."""

    source: str
    """The folder of a checkpoint, below the scratch folder."""
    layout: tuple[int, int]

    def folder(self, world: int) -> str:
        """The folder to which `world` ranks write the same state again, below the scratch folder."""
        return f"moved-{world}-{self.layout}-from-{self.source.partition('/')[0]}"


LAYOUTS = {"alone": (1, (1, 1)), "tensor": (2, (2, 1)), "pipeline": (2, (1, 2)), "data": (2, (1, 1))}
"""The number of ranks, and (tensor, pipeline) parallel sizes."""
MOVES = {
    "2 ranks to 1": (1, Move("resume-float32-2-(1, 1)/step=000002", (1, 1))),
    "2 ranks to 1 to 4": (4, Move("moved-1-(1, 1)-from-resume-float32-2-(1, 1)/step=000002", (1, 1))),
    "TP and PP 1 to 2": (4, Move("resume-float32-1-(1, 1)/step=000002", (2, 2))),
    "TP 2 to 1": (4, Move("resume-float32-2-(2, 1)/step=000002", (1, 2))),
    "PP 2 to 1": (4, Move("resume-float32-2-(1, 2)/step=000002", (2, 1))),
}
"""The number of ranks, and what they go on from."""


def make_model(family: str, directory: Path) -> Path:
    """A random model whose norms and biases differ from their defaults, so that none can be forgotten."""
    model_class, config = FAMILIES[family]
    torch.manual_seed(1)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory / family)
    return directory / family


def sequences() -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(2)
    lengths = (5, 40, 17, 17, 33, 2, 28, 39)
    tokens = [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    prompts = {1: 9, 4: 9, 7: 9, 2: 5, 3: 5}
    for index, length in prompts.items():
        tokens[index][:length] = tokens[1 if length == 9 else 2][:length]
    return [TokenSequence(row, prompts.get(index, 1), index) for index, row in enumerate(tokens)]


def my_sequences(policy: Policy) -> list[TokenSequence]:
    """Uneven on purpose: of two data-parallel ranks, the second has the last sequence only."""
    rows = sequences()
    return rows if policy.dp_size == 1 else (rows[:-1], rows[-1:], [], [])[policy.dp_rank]


def my_batches(policy: Policy) -> list[MicroBatch]:
    return pack(my_sequences(policy), 90, policy.pad_multiple)


def loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    num_tokens = sum(sequence.response_length for sequence in sequences())
    weight = torch.tensor([1.0 + index % 3 for index in batch.indices])[:, None]
    total = (weight * logprobs * batch.mask).sum() + 0.5 * entropy.sum()
    return -total / num_tokens, {"entropy": entropy.sum() / num_tokens}


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_weights()}


def by_sequence(batches: list[MicroBatch], tensors: list[Tensor]) -> dict[int, Tensor]:
    """[length, ...] of each sequence of this rank, without padding."""
    return {
        index: tensor[row, : int(batch.lengths[row])].clone()
        for batch, tensor in zip(batches, tensors, strict=True)
        for row, index in enumerate(batch.indices)
    }


def by_response(batches: list[MicroBatch], logprobs: list[Tensor]) -> dict[int, Tensor]:
    """[response length] of each sequence of this rank."""
    return {
        index: found[row][batch.mask[row]].clone()
        for batch, found in zip(batches, logprobs, strict=True)
        for row, index in enumerate(batch.indices)
    }


def gradients(policy: Policy, batches: list[MicroBatch]) -> list[Tensor]:
    """This rank's gradients of the loss, with nothing learnt from them."""
    policy.train_step(batches, loss, lr=0.0)
    return [parameter.main_grad.clone() for parameter in policy.model.parameters()]


def run_family(model_dir: Path, layout: tuple[int, int], ranks: Ranks, scratch: Path) -> dict[str, Any]:
    config = PolicyConfig(tensor_parallel=layout[0], pipeline_parallel=layout[1], **CONFIG)
    policy = Policy(model_dir, config, dtype="float32", ranks=ranks, seed=0, keep_reference=True)
    result: dict[str, Any] = {"loaded": weights_of(policy), "stage": policy.pp_rank, "traffic": refit_traffic(policy)}
    batches = my_batches(policy)
    features = policy.forward_features(batches, LAYERS)
    head = Drafter.create(model_dir, DrafterConfig(), torch.arange(VOCABULARY), ranks).model.policy_logits
    last = SHAPE["hidden_size"]
    result["logits"] = by_sequence(batches, [head(item.hidden[..., -last:]) for item in features])
    result["top1"] = by_sequence(batches, [item.target_top1 for item in features])
    result["hidden"] = by_sequence(batches, [item.hidden for item in features])
    result["logprobs"] = by_response(batches, policy.logprobs(batches, temperature=0.7))
    result["metrics"], trained_features = policy.train_step(batches, loss, features=LAYERS)
    result["features_equal"] = all(
        torch.equal(a.hidden, b.hidden) and torch.equal(a.target_top1, b.target_top1)
        for a, b in zip(features, trained_features, strict=True)
    )
    if layout != (1, 1) or ranks.world_size == 1:  # data-parallel ranks have samples of their own
        result["drafter"] = train_drafter(policy)
    before = weights_of(policy)
    policy.train_step([], loss)
    result["unmoved"] = all(torch.equal(before[name], tensor) for name, tensor in policy.hf_weights())
    for _ in range(2):
        policy.train_step(batches, loss)
    result["trained"] = weights_of(policy)
    with policy.reference_weights():
        result["reference"] = by_response(batches, policy.logprobs(batches, temperature=0.7))
    result["after_reference"] = weights_of(policy)
    policy.save_pretrained(scratch / "saved")
    alone = [pack([sequence], policy.pad_multiple, policy.pad_multiple)[0] for sequence in my_sequences(policy)]
    result["shared"] = sum(batch.num_shared for batch in batches)
    result["gradients"] = [gradients(policy, batches), gradients(policy, alone)]
    result["passes"] = [one_pass(policy, batches, MAX_LOGITS), one_pass(policy, batches, 5 * VOCABULARY)]
    return result


def one_pass(policy: Policy, batches: list[MicroBatch], most: int) -> dict[str, list[Tensor]]:
    """What a forward and a backward pass give where at most so many logits exist at a time."""
    scores.MAX_LOGITS = most  # this process is the test's own
    features = policy.forward_features(batches, LAYERS)
    return {
        "logprobs": policy.logprobs(batches, temperature=0.7),
        "top1": [item.target_top1 for item in features],
        "gradients": gradients(policy, batches),
    }


def train_drafter(policy: Policy) -> dict[str, Any]:
    """What a drafter learns from a sample whose rows the ranks divide among them."""
    config = DrafterConfig(max_tokens_per_step=90, tokens_per_micro_batch=50)
    drafter = Drafter.create(policy.model_dir, config, torch.arange(0, VOCABULARY - 1, 2), policy.ranks, seed=3)
    batches = pack(sequences(), 90, policy.pad_multiple)
    sampling.MIN_WINDOW = 16  # this process is the test's own
    sample = sampling.sample_sequences(
        [batches], max_tokens=90, tokens_per_micro_batch=50, owners=policy.model_size, seed=1
    )
    kept = policy.forward_features(batches, drafter.feature_layers, sample.windows)
    num_rows = sum(len(item.mask) for item in kept)
    features = sample.arrange(kept, batches, policy.model_rank)
    metrics = [drafter.update(features, lr=1e-3, epochs=2), drafter.update(features, lr=0.0)]
    weights = {name: tensor.clone() for name, tensor in drafter.model.state_dict().items()}
    return {"rows": num_rows, "all rows": len(sample.windows), "metrics": metrics, "weights": weights}


def state_of(policy: Policy) -> dict[str, Tensor]:
    """This rank's part of masters and moments."""
    shards = enumerate(policy.shards())
    return {f"{index} {kind}": flat.clone() for index, shard in shards for kind, flat in shard.state.items()}


def run_resume(model_dir: Path, layout: tuple[int, int], ranks: Ranks, dtype: str, scratch: Path) -> dict[str, Any]:
    """Four steps, against two, a checkpoint, a fresh policy and two more."""
    config = PolicyConfig(tensor_parallel=layout[0], pipeline_parallel=layout[1], **CONFIG)

    def fresh() -> Policy:
        return Policy(model_dir, config, dtype=dtype, ranks=ranks, seed=0)

    straight, interrupted = fresh(), fresh()
    metrics = [straight.train_step(my_batches(straight), loss)[0] for _ in range(4)]
    checkpoints = Checkpoints(scratch, interrupted, Retention(1))
    for step in (1, 2):
        interrupted.train_step(my_batches(interrupted), loss)
        checkpoints.save(TrainState(step, interrupted, None))
    interrupted.train_step(my_batches(interrupted), loss)  # while it is written
    checkpoints.wait()
    error = fill_disk(checkpoints, interrupted)
    other_error = fail_to_write(Checkpoints(scratch, interrupted, Retention(1)), interrupted)
    resumed = fresh()
    found = Checkpoints(scratch, resumed, Retention(1)).restore(None)
    assert found is not None
    again = [resumed.train_step(my_batches(resumed), loss)[0] for _ in range(2)]
    return {
        "step": found.state.step,
        "full disk": error,
        "no memory": other_error,
        "kept": sorted(path.name for path in scratch.iterdir() if path.is_dir()),  # unfinished folders, too
        "metrics": (metrics[2:], again),
        "weights": (weights_of(straight), weights_of(resumed)),
        "optimizer": (state_of(straight), state_of(resumed)),
    }


def fill_disk(checkpoints: Checkpoints, policy: Policy) -> str:
    """What a save says for which the last rank finds the disk full."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if policy.ranks.rank == policy.ranks.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, most[1]))  # no file may be longer
    checkpoints.save(TrainState(3, policy, None))
    try:
        checkpoints.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    return ""


def fail_to_write(checkpoints: Checkpoints, policy: Policy) -> str:
    """What a save says for which the last rank has no memory."""
    write = checkpointing.write_tensors
    if policy.ranks.rank == policy.ranks.world_size - 1:
        checkpointing.write_tensors = no_memory  # this process is the test's own
    checkpoints.save(TrainState(3, policy, None))
    try:
        checkpoints.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        checkpointing.write_tensors = write
    return ""


def no_memory(*_: Any) -> Any:
    raise MemoryError("no memory to write with")


def run_move(scratch: Path, move: Move, ranks: Ranks) -> dict[str, Any]:
    """What a layout makes of another one's checkpoint, and two more steps from it."""
    config = PolicyConfig(tensor_parallel=move.layout[0], pipeline_parallel=move.layout[1], **CONFIG)
    policy = Policy(scratch / "llama-tied", config, dtype="float32", ranks=ranks, seed=0)
    deadline = time.monotonic() + 1200
    while not (source := scratch / move.source).exists():  # it may be under way in other processes
        assert time.monotonic() < deadline, move
        time.sleep(0.1)
    load(source, policy, None)
    restored, traffic = weights_of(policy), refit_traffic(policy)
    checkpoints = Checkpoints(scratch / move.folder(ranks.world_size), policy, Retention(1))
    checkpoints.save(TrainState(2, policy, None))
    metrics = [policy.train_step(my_batches(policy), loss)[0] for _ in range(2)]
    checkpoints.wait()
    return {
        "metrics": metrics,
        "restored": restored,
        "weights": weights_of(policy),
        "stage": policy.pp_rank,
        "traffic": traffic,
    }


def work(world: int, scratch: Path) -> None:
    """One rank of `world`: the layouts of so many ranks, one after another, and then the moves to so many."""
    ranks = join()
    for layout in (layout for size, layout in LAYOUTS.values() if size == world):
        results: dict[str, Any] = {}
        for family in FAMILIES:
            folder = scratch / f"{family}-{world}-{layout}"
            results[family] = run_family(scratch / family, layout, ranks, folder)
        for dtype in ("float32", "bfloat16"):
            folder = scratch / f"resume-{dtype}-{world}-{layout}"
            results[dtype] = run_resume(scratch / "llama-tied", layout, ranks, dtype, folder)
        torch.save(results, scratch / f"result-{world}-{layout}-{ranks.rank}.pt")
        parallel_state.destroy_model_parallel()  # a run keeps one layout per process; here it saves three start-ups
    for move in (move for size, move in MOVES.values() if size == world):
        results = run_move(scratch, move, ranks)
        torch.save(results, scratch / f"{move.folder(world)}-{ranks.rank}.pt")
        parallel_state.destroy_model_parallel()
    leave()


def main(scratch: Path) -> None:
    wait([*start(1, scratch), *start(2, scratch)])
    wait(start(4, scratch))


def start(world: int, scratch: Path) -> list[int]:
    return fork(world, lambda rank: work(world, scratch))


def results_of(world: int, layout: tuple[int, int], scratch: Path) -> list[dict[str, Any]]:
    """What every rank left."""
    return [torch.load(scratch / f"result-{world}-{layout}-{rank}.pt", weights_only=False) for rank in range(world)]


def moved(world: int, move: Move, scratch: Path) -> list[dict[str, Any]]:
    """What every rank left of a move."""
    return [torch.load(scratch / f"{move.folder(world)}-{rank}.pt", weights_only=False) for rank in range(world)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
