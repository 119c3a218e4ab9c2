"""The drafter beside the policy: pretraining, the online update of each RL step, and what the engine loads.

It never touches the policy: features are detached, the input embeddings are a copy, and its optimizer holds only its
own parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

from specrl.config import DrafterConfig
from specrl.config.algorithms import DRAFT_LOSSES
from specrl.distributed import Ranks
from specrl.models.directory import EMBEDDINGS, HEAD
from specrl.models.drafters import LOSS_KEY
from specrl.models.families import family_of_model
from specrl.models.hf_io import TensorReader
from specrl.training.drafter.chains import ChainBatch, pack_chains
from specrl.training.drafter.io import config_dict, read_drafter, vocabulary_tensors, write_drafter
from specrl.training.drafter.kinds.eagle3 import Eagle3, Eagle3Shape
from specrl.training.drafter.kinds.layers import DraftModule
from specrl.training.drafter.kinds.mtp import Mtp, mtp_shape
from specrl.training.drafter.resume import TrainingCheckpoints, TrainingProgress
from specrl.training.drafter.ttt import Objective, Tally, metrics_from_sums, train_chains
from specrl.training.features import Features
from specrl.training.schedules import lr_factor

WARMUP_STEPS = 10
FINAL_LR_FRACTION = 0.05
MOMENTS = ("exp_avg", "exp_avg_sq")


def count_tokens(token_lists: Iterable[Sequence[int]], vocab_size: int) -> NDArray[np.int64]:
    found = np.fromiter(chain.from_iterable(token_lists), np.int64)
    return np.bincount(found, minlength=vocab_size).astype(np.int64)


def choose_draft_vocabulary(counts: NDArray[np.int64], size: int) -> Tensor:
    """The most frequent tokens, padded with the lowest ids that never occur: int64 [size], sorted."""
    by_frequency = np.argsort(-counts, kind="stable")  # of equally frequent ids, the lowest first
    return torch.from_numpy(np.sort(by_frequency[:size]))


@torch.no_grad()
def initialise_from_policy(model: Eagle3, policy_dir: Path, draft_tokens: Tensor) -> None:
    """Start from the policy's last layers, final norm and head rows instead of noise.

    Attention copies a layer's projections, in the drafter's first layer for the hidden-state half of its input; the
    embedding half and `fc` stay random. MLPs are copied only if they have the policy's width. Only the value projection
    is copied from a policy with QK norm or with another pairing of rotated channels.

    On SmolLM2, three epochs from here beat ten from random layers (acceptance length 2.61 against 2.46).
    """
    policy_config = AutoConfig.from_pretrained(policy_dir)
    family, hidden = family_of_model(policy_config), model.shape.hidden_size
    # Projections trained with QK norm would saturate attention without it.
    only_values = family.qk_norm or family.rotary_interleaved
    projections = ("v_proj",) if only_values else ("q_proj", "k_proj", "v_proj")
    policy = TensorReader(policy_dir)
    sources = {"norm": "model.norm"}
    with_mlp = family.router is None and model.shape.intermediate_size == policy_config.intermediate_size
    for number in range(model.shape.num_layers):
        own = f"layers.{number}" if number else "midlayer"
        other = f"model.layers.{policy_config.num_hidden_layers - model.shape.num_layers + number}"
        for name in projections:
            weight = model.get_parameter(f"{own}.self_attn.{name}.weight")
            weight[:, -hidden:] = policy.read(f"{other}.self_attn.{name}.weight")
        sources |= {
            f"{own}.self_attn.o_proj": f"{other}.self_attn.o_proj",
            f"{own}.{'input_layernorm' if number else 'hidden_norm'}": f"{other}.input_layernorm",
            f"{own}.post_attention_layernorm": f"{other}.post_attention_layernorm",
        }
        if with_mlp:
            sources |= {f"{own}.mlp.{name}_proj": f"{other}.mlp.{name}_proj" for name in ("gate", "up", "down")}
    for name, source in sources.items():
        model.get_parameter(f"{name}.weight").copy_(policy.read(f"{source}.weight"))
    head = HEAD if HEAD in policy.names else EMBEDDINGS
    model.lm_head.weight.copy_(policy.read(head)[draft_tokens])


class FeatureStream(NamedTuple):
    """Features of a rank's micro-batches that do not fit into memory together."""

    size: int
    in_order: Callable[[list[int]], Iterator[Features | None]]
    """Yields the features of micro-batches in the order of an epoch, then None for every step that other ranks take
    alone."""


def _held(features: Sequence[Features | None]) -> FeatureStream:
    return FeatureStream(len(features), lambda order: chain((features[index] for index in order), repeat(None)))


class _StepResult(NamedTuple):
    loss: Tensor
    sums: Tensor
    """This rank's `Tally.sums`; zeros unless requested."""
    norm: float
    """The gradient norm before clipping, over all ranks unless this one trains alone."""
    flag: bool


class Drafter:
    """A drafter, its optimizer and its data-parallel update.

    It is an EAGLE-3 drafter (`create`, `load`), or the policy's own multi-token-prediction layer (`of_policy`). All
    ranks call every method marked as collective, in the same order.
    """

    def __init__(
        self,
        model: DraftModule,
        draft_tokens: Tensor,
        policy_dir: Path,
        config: DrafterConfig,
        ranks: Ranks,
        *,
        seed: int,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.model = model.to(ranks.device)
        self.shape = model.shape
        self.draft_tokens = draft_tokens.to(ranks.device)
        self._policy_config = AutoConfig.from_pretrained(policy_dir)
        self._seed = seed
        self._updates = 0
        self.changes = 0
        """The number of changes to the result of `state_dict`."""
        model.policy_eps = self._policy_config.rms_norm_eps
        policy = TensorReader(policy_dir)
        for name in model.SHARED:
            tied = name == HEAD and name not in policy.names
            self.share(name, policy.read(EMBEDDINGS if tied else name))
        self._parameters = list(self.model.parameters())
        weights = [config.position_decay**position for position in range(config.ttt_steps)]
        self._objective = Objective(DRAFT_LOSSES.function(config.loss), weights)
        # One flat buffer: gradients are views of it, so that the all-reduce, the clip and the reset are one call each.
        sizes = [p.numel() for p in self._parameters]
        self._gradient = torch.zeros(sum(sizes), device=ranks.device)
        for parameter, view in zip(self._parameters, torch.split(self._gradient, sizes), strict=True):
            parameter.grad = view.view_as(parameter)
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        for parameter in self._parameters:  # as AdamW itself would begin
            moments = {key: torch.zeros_like(parameter) for key in MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.zeros((), device=ranks.device), **moments}

    @classmethod
    def create(
        cls, policy_dir: Path, config: DrafterConfig, draft_tokens: Tensor, ranks: Ranks, seed: int = 0
    ) -> Drafter:
        """A new EAGLE-3 drafter, the same on every rank, for the sorted target ids `draft_tokens` `[draft_vocab]`."""
        shape = Eagle3Shape.from_policy(
            AutoConfig.from_pretrained(policy_dir),
            len(draft_tokens),
            config.intermediate_size,
            num_layers=config.num_layers,
            chosen_layers=config.feature_layers,
            sliding_window=config.sliding_window,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Eagle3(shape)
        initialise_from_policy(model, policy_dir, draft_tokens.cpu())
        return cls(model, draft_tokens, policy_dir, config, ranks, seed=seed)

    @classmethod
    def load(cls, directory: Path, policy_dir: Path, config: DrafterConfig, ranks: Ranks, seed: int = 0) -> Drafter:
        """The drafter in an EAGLE-3 directory of any layout, with its own sizes and a fresh optimizer."""
        dtype = AutoConfig.from_pretrained(policy_dir).dtype or torch.bfloat16
        stored = read_drafter(directory, policy_dir, dtype)
        model = Eagle3(stored.shape)
        model.load_state_dict(stored.tensors)
        return cls(model, stored.draft_tokens, policy_dir, config, ranks, seed=seed)

    @classmethod
    def of_policy(cls, policy_dir: Path, config: DrafterConfig, ranks: Ranks, seed: int = 0) -> Drafter:
        """The first multi-token-prediction layer of the policy in `policy_dir`, with a fresh optimizer."""
        hf_config = AutoConfig.from_pretrained(policy_dir)
        shape = mtp_shape(hf_config)
        model = Mtp(shape, family_of_model(hf_config))
        policy = TensorReader(policy_dir)
        model.load_state_dict({name: policy.read(model.name_on_disk(name)) for name in model.state_dict()})
        return cls(model, torch.arange(shape.vocab_size), policy_dir, config, ranks, seed=seed)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The policy's layers whose features it learns from: those that it reads, and the last one's output."""
        own, last = self.shape.feature_layers, self._policy_config.num_hidden_layers
        return own if last in own else (*own, last)

    def share(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor of the policy, by its name on disk, if the model has it; the others are ignored."""
        attribute = self.model.SHARED.get(name)
        if attribute is None:
            return
        if name == HEAD and self.shape.draft_vocab_size < self.shape.vocab_size:
            tensor = tensor[self.draft_tokens.to(tensor.device)]
        held: Tensor | None = getattr(self.model, attribute)
        # A refit streams tensors in inference mode; a tensor created there could not be used in training.
        with torch.inference_mode(False), torch.no_grad():
            if held is None:
                setattr(self.model, attribute, tensor.to(self.ranks.device, self.shape.dtype, copy=True))
            else:
                held.copy_(tensor)  # reusing memory saves mapping new pages

    def update(
        self,
        features: Sequence[Features | None] | FeatureStream,
        *,
        lr: float,
        epochs: int = 1,
        on_progress: Callable[[int, int], None] | None = None,
        checkpoints: TrainingCheckpoints | None = None,
    ) -> dict[str, float]:
        """Train on detached features, with one step per micro-batch of the rank that has the most (collective).

        With several epochs (pretraining) the learning rate warms up and follows a cosine to 5 %; in one epoch (the
        online update) it is constant. `lr = 0` measures without updating. Features are None for a micro-batch that only
        other ranks have. `loss` (see `train_chains`), `grad_norm` (before clipping) and the metrics of
        `metrics_from_sums` are those of the last epoch; each batch is measured before it is trained on.
        """
        stream = features if isinstance(features, FeatureStream) else _held(features)
        train, epochs = lr > 0, epochs if lr > 0 else 1
        num_steps = max(self.ranks.gather(stream.size))
        nothing = torch.zeros(self.config.ttt_steps + 1, 3, dtype=torch.float64, device=self.ranks.device)
        so_far = TrainingProgress(0, nothing.sum(), nothing, [])
        if checkpoints is not None and (found := checkpoints.restore()) is not None:
            state, so_far = found
            self.load_state_dict(state)
        for epoch in range(so_far.done // max(num_steps, 1), epochs):
            last, first = epoch == epochs - 1, so_far.done - epoch * num_steps
            order = self._order(stream.size, epoch) if train else list(range(stream.size))
            for batch in islice(stream.in_order(order[first:]), num_steps - first):
                rate = lr * schedule(so_far.done, epochs * num_steps) if epochs > 1 else lr
                wanted = checkpoints is not None and checkpoints.wanted()
                result = self._step(self._pack(batch), rate, measure=last, flag=wanted)
                so_far.done += 1
                if last:
                    so_far.loss, so_far.sums = so_far.loss + result.loss, so_far.sums + result.sums
                    so_far.norms.append(result.norm)
                if on_progress is not None:
                    on_progress(so_far.done, epochs * num_steps)
                if checkpoints is not None and result.flag and so_far.done < epochs * num_steps:
                    checkpoints.reached(self.state_dict(), so_far)
        moved = train and num_steps > 0
        self._updates += moved
        self.changes += moved
        self._all_reduce(so_far.sums)
        self._all_reduce(so_far.loss)
        steps = max(num_steps, 1)
        metrics = metrics_from_sums(so_far.sums.cpu())
        return {"loss": so_far.loss.item() / steps, "grad_norm": sum(so_far.norms) / steps, **metrics}

    def _pack(self, features: Features | None) -> ChainBatch | None:
        if features is None:
            return None
        return pack_chains(features, self.draft_tokens, self.shape.vocab_size, self.config.ttt_steps)

    def _order(self, size: int, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self._seed << 32) % 2**62 + self._updates * 1000 + epoch)
        return torch.randperm(size, generator=generator).tolist()

    def step_alone(self, features: Features, lr: float) -> tuple[float, Tensor, float]:
        """Train this rank's copy alone until `average`; return loss, `Tally.sums` and gradient norm."""
        result = self._step(self._pack(features), lr, measure=True, alone=True)
        return result.loss.item(), result.sums.cpu(), result.norm

    @torch.no_grad()
    def average(self, weight: float) -> None:
        """Average parameters and moments over ranks by `weight`; the weights must sum to 1 (collective)."""
        self.changes += 1
        for parameter in self._parameters:
            state = self.optimizer.state[parameter]
            for tensor in (parameter, *(state[key] for key in MOMENTS)):
                tensor.mul_(weight)
                self._all_reduce(tensor)
        steps = [state["step"] for state in self.optimizer.state.values()]
        furthest = max(self.ranks.gather(steps[0].item()))
        for step in steps:
            step.fill_(furthest)

    def _step(
        self, batch: ChainBatch | None, lr: float, measure: bool, *, alone: bool = False, flag: bool = False
    ) -> _StepResult:
        """Run a forward pass and, with lr > 0, a backward pass and an optimizer step (collective unless `alone`)."""
        device, steps = self.ranks.device, self.config.ttt_steps
        shared = torch.zeros(steps + 1, dtype=torch.float64, device=device)
        shared[steps] = flag
        if batch is not None:
            shared[:steps] = batch.loss_counts()
        if not alone:
            self._all_reduce(shared)
        counts = shared[:steps]
        loss = torch.zeros((), device=device)
        sums = torch.zeros(steps + 1, 3, dtype=torch.float64, device=device)
        self._gradient.zero_()
        if batch is not None:
            tally = Tally(batch, self.draft_tokens) if measure else None
            loss = train_chains(self.model, batch, self._objective, counts, learn=lr > 0, tally=tally)
            if tally is not None:
                sums = tally.sums()
        norm = self._descend(lr, alone) if lr > 0 else 0.0
        return _StepResult(loss.double(), sums, norm, bool(shared[steps] > 0))

    def _descend(self, lr: float, alone: bool) -> float:
        """Take an optimizer step; return the gradients' norm before clipping (collective unless `alone`)."""
        if not alone:
            self._all_reduce(self._gradient)
        norm = float(self._gradient.norm())
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the drafter's gradient is {norm}; its weights are unchanged")
        if norm > self.config.clip_grad:
            self._gradient.mul_(self.config.clip_grad / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.changes += 1
        return norm

    def _all_reduce(self, tensor: Tensor) -> None:
        if self.ranks.world_size > 1:
            assert dist.group.WORLD is not None
            dist.all_reduce(tensor)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the drafter's tensors by their names on disk, in the policy's compute type, as a refit loads them.

        Tensors shared with the policy are left out: the engine's drafter shares them too.
        """
        for name, parameter in self.model.state_dict().items():
            yield self.model.name_on_disk(name), parameter.to(self.shape.dtype)
        if self.shape.draft_vocab_size < self.shape.vocab_size:
            yield from vocabulary_tensors(self.draft_tokens, self.shape.vocab_size).items()

    def save(self, directory: Path, policy_version: int) -> None:
        """Write the EAGLE-3 directory, on one rank: the ranks' drafters are equal."""
        assert isinstance(self.shape, Eagle3Shape)
        config = config_dict(self.shape, self._policy_config, policy_version)
        write_drafter(directory, config | {LOSS_KEY: str(self.config.loss)}, self.named_weights())

    def state_dict(self) -> dict[str, Tensor]:
        """The state that an exact resume needs besides `SHARED`; the tensors are not copies."""
        state: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            state |= {f"{key}/{name}": self.optimizer.state[parameter][key] for key in MOMENTS}
        steps = self.optimizer.state[self._parameters[0]]["step"].long()
        counters = {"adam_steps": steps, "updates": torch.tensor(self._updates)}
        return {**state, **counters, "draft_tokens": self.draft_tokens}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; raise ValueError for another draft vocabulary."""
        if not torch.equal(state["draft_tokens"].to(self.ranks.device), self.draft_tokens):
            raise ValueError("checkpoint holds a drafter of another draft vocabulary; start the run in a new folder")
        self.model.load_state_dict({name: state[f"model/{name}"] for name in self.model.state_dict()})
        self.changes += 1
        self._updates = int(state["updates"])
        for name, parameter in self.model.named_parameters():
            own = self.optimizer.state[parameter]
            own["step"].fill_(int(state["adam_steps"]))
            for key in MOMENTS:
                own[key].copy_(state[f"{key}/{name}"])


def schedule(step: int, num_steps: int) -> float:
    """The factor on pretraining's peak learning rate at a step: 10 steps of warm-up, then a cosine to 5 %."""
    return lr_factor(step, num_steps, decay="cosine", warmup_steps=WARMUP_STEPS, final_fraction=FINAL_LR_FRACTION)
