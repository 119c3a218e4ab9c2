"""The memory that a rank needs, item by item, computed only from the model's shape and the configuration.

Some items exist for the whole stage, others only in one phase of a step. A rank needs the sum of the former plus that
of the largest phase. Activations follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", adapted to a SwiGLU decoder with grouped-query attention and without dropout. The memory that FP8
inputs save is not counted, so the plan errs on the safe side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from specrl.config import Config, PolicyConfig, StageName
from specrl.config.base import ENGINE_STAGES
from specrl.config.rollout import batched_tokens
from specrl.models.drafters import with_source_heads
from specrl.models.families import EXPERTS_IN_A_BYTE
from specrl.models.shapes import ModelShape, teacher_shape

GIB = 2**30
FP32 = 4
MASTER_AND_MOMENTS = 3 * FP32  # bytes per parameter: the FP32 master weight and Adam's two moments
HOST_RUNTIME_GIB = {0: 1.5, 1: 6.0}  # Python and libraries, without a GPU and with one (CUDA, pinned buffers)
DEVICE_RUNTIME_GIB = 3.0  # the CUDA context and the allocator's fragments
COMMUNICATORS_GIB = 1.0  # NCCL buffers of Megatron's groups and the engine's
TENSOR_BYTES = 2**28  # in flight, while the engine waits for the rest of a module
MARGIN = 0.08  # of a GPU, which every shipped configuration leaves free
PROBE_TOKENS = 128  # scored by the probe after a refit (`rollout/refit/policy_probe.py`)
SCORED_BYTES = 10  # per token and vocabulary entry of a scored prompt: logits in both types, and log-probs
GRAPHS = "engine's CUDA graphs"
GRAPHS_GIB = 2.0  # of a compiled engine; they stay on the GPU while it sleeps
MAX_LOGITS = 2**27  # live at a time (`training/megatron/scores.py`)
LOGIT_CHUNK = {0: 2**21, 1: 2**25}  # of them in float32, on a CPU and on a GPU
MOST_SHARING = 8  # responses sharing one copy of a prompt in a micro-batch (`training/batches.py`)
CALIBRATION_POSITIONS = 640  # tokens in each of the two sets that it compares (`training/calibration.py`)
DRAFTER_SCORES = 2**26  # held at once in a step of drafter training (`training/drafter/attention.py`)
DRAFTER_CHAINS = 1024  # in memory at once (`training/drafter/chains.py`)


@dataclass(frozen=True)
class MemoryItem:
    name: str
    gib: float
    how: str  # its factors, in words
    phase: str | None = None  # phase of a step; None for the whole stage


def peak_gib(items: Iterable[MemoryItem]) -> float:
    resident, phases = 0.0, {"": 0.0}
    for item in items:
        if item.phase is None:
            resident += item.gib
        else:
            phases[item.phase] = phases.get(item.phase, 0.0) + item.gib
    return resident + max(phases.values())


@dataclass(frozen=True)
class Rank:
    """One rank of a stage: model, configuration and layout, which determine what it must hold."""

    shape: ModelShape
    config: Config
    gpu: int  # 1 where the rank has a GPU, otherwise 0
    data_parallel: int
    stage: StageName = "train"

    @property
    def pretrains(self) -> bool:
        """Whether this stage pretrains the drafter, so that the engine neither drafts nor is calibrated for FP8 yet."""
        return self.stage == "pretrain"

    @property
    def dtype_bytes(self) -> int:
        return 2 if self.config.model.dtype == "bfloat16" else FP32

    @property
    def longest_micro_batch(self) -> int:
        # A sequence above the limit forms a micro-batch by itself.
        return max(self.config.policy.tokens_per_micro_batch, self.config.model.max_length)

    @property
    def route_bytes(self) -> int:
        shape = self.shape
        return shape.num_layers * shape.experts_per_token * (1 if shape.num_experts <= EXPERTS_IN_A_BYTE else 2)

    @property
    def layers(self) -> int:
        return -(-self.shape.num_layers // self.config.policy.pipeline_parallel)

    @property
    def expert_parameters(self) -> float:
        return self.layers * self.shape.expert_parameters_per_layer / self.config.policy.expert_parallel

    @property
    def shared_parameters(self) -> float:
        shape, policy = self.shape, self.config.policy
        both_ends = policy.pipeline_parallel == 1 and not shape.tied
        embeddings = shape.embedding_parameters * (2 if both_ends else 1)
        layer = shape.parameters_per_layer - shape.expert_parameters_per_layer
        return (self.layers * layer + embeddings) / policy.tensor_parallel

    @property
    def adapter_parameters(self) -> int:
        """The number of LoRA parameters; 0 if all weights are trained."""
        lora, parts = self.config.policy.lora, self.config.policy.tensor_parallel
        return 0 if lora is None else self.layers * self.shape.adapter_parameters_per_layer(lora.rank, parts)

    @property
    def expert_data_parallel(self) -> int:
        policy = self.config.policy
        return max(self.data_parallel * policy.tensor_parallel // policy.expert_parallel, 1)

    @property
    def optimizer_parameters(self) -> float:
        """The number of parameters whose masters and moments the distributed optimizer keeps on one rank."""
        if self.config.policy.lora is not None:
            return self.adapter_parameters / self.data_parallel
        return self.shared_parameters / self.data_parallel + self.expert_parameters / self.expert_data_parallel

    @cached_property
    def drafter_shape(self) -> ModelShape:
        return with_source_heads(self.config, self.shape)

    @property
    def drafter_parameters(self) -> int:
        """The drafter's parameters: of EAGLE-3, whose first layer reads twice the hidden size, or of a policy layer."""
        shape, drafter = self.shape, self.config.drafter
        hidden = shape.hidden_size
        if self.config.speculation.draft_method.is_policy_layer:
            layout = shape.family.mtp
            norms = 2 if layout is not None and layout.final_norm is None else 3
            return 2 * hidden * hidden + shape.parameters_per_layer + norms * hidden
        heads = self.drafter_shape
        read = hidden * (heads.query_size + 2 * heads.kv_size)
        layer = read + hidden * heads.query_size + 3 * hidden * (drafter.intermediate_size or shape.intermediate_size)
        ends = drafter.num_features * hidden * hidden + drafter.draft_vocab_size * hidden
        return ends + read + drafter.num_layers * layer


def policy_items(rank: Rank, *, trainable: bool, fp8: bool = False) -> list[MemoryItem]:
    shape, config, size = rank.shape, rank.config, rank.dtype_bytes
    count, policy = rank.shared_parameters + rank.expert_parameters, config.policy
    experts = f", EP {policy.expert_parallel}" if policy.expert_parallel > 1 else ""
    shard = f"(TP {policy.tensor_parallel}, PP {policy.pipeline_parallel}{experts})"
    items = [_item("policy weights", count * size, f"{count / 1e9:.2f} G parameters {shard} x {size} B")]
    if trainable:
        trained = rank.adapter_parameters or count
        optimizer = MASTER_AND_MOMENTS if size < FP32 else 2 * FP32
        experts = f", of experts / {rank.expert_data_parallel}" if shape.num_experts else ""
        how = f"{optimizer} B per parameter / {rank.data_parallel} data-parallel ranks{experts}"
        items += [
            _item("gradients", trained * FP32, "float32"),
            _item("masters and Adam moments", rank.optimizer_parameters * optimizer, how),
        ]
        if config.train.kl_coef:
            items.append(_item("reference weights", trained * size, "train.kl_coef > 0 keeps a reference"))
        if count := rank.adapter_parameters:
            layers = 1 if policy.recompute else rank.layers
            # The largest merged weight also has a gradient.
            merged = layers * shape.linear_parameters_per_layer + 4 * shape.hidden_size * shape.intermediate_size
            how = f"linear layers with adapters, {layers} of them"
            items.append(_item("adapters", count * size, f"{count / 1e6:.1f} M parameters x {size} B"))
            items.append(_item("merged weights", merged / policy.tensor_parallel * size, how, "policy"))
    if fp8 and rank.gpu:
        others = shape.linear_parameters_per_layer - shape.expert_parameters_per_layer
        linear = rank.layers * others / config.policy.tensor_parallel + rank.expert_parameters
        items.append(_item("FP8 weights", 2 * linear, "linear layers, row- and column-wise, 1 B each"))
    return [*items, activations(rank, trainable=trainable), logits(rank, trainable=trainable)]


def teacher_items(rank: Rank) -> list[MemoryItem]:
    """Count the frozen model of `train.teacher`, laid out like the policy; its pass ends before the update begins."""
    shape = teacher_shape(rank.config)
    items = policy_items(replace(rank, shape=shape), trainable=False) if shape is not None else []
    return [
        replace(item, name=f"teacher's {item.name.removeprefix('policy ')}", phase=item.phase and "teacher")
        for item in items
    ]


def stored_parameters(config: Config, shape: ModelShape) -> int:
    """The parameters of the policy whose state a checkpoint holds."""
    lora = config.policy.lora
    return shape.parameters if lora is None else shape.num_layers * shape.adapter_parameters_per_layer(lora.rank)


def activations(rank: Rank, *, trainable: bool) -> MemoryItem:
    """Count the activations of the largest micro-batch.

    Per token, a layer keeps 4 H numbers for the two residuals and norm outputs, 2 (Q + KV) for query, key, value and
    attention output (4 with a QK norm), and 3 F for the SwiGLU. On a GPU, a prompt's keys and values are kept once per
    response that shares it. H is the hidden size, Q and KV the channels of all query and key heads, F the width of the
    MLP or of all experts of a token, each of which adds 2 H. Tensor parallelism divides everything: heads, columns and
    the sequence.

    With recomputation, each layer keeps only H numbers, and one whole layer exists at a time. A pipeline stage holds as
    many micro-batches as there are stages, so the pipeline size cancels.
    """
    shape, config = rank.shape, rank.config
    layer = _layer_bytes(rank, trainable=trainable)
    tokens, how = rank.longest_micro_batch, f"{rank.longest_micro_batch} tokens x {layer / 1024:.0f} KiB"
    if not trainable:
        return _item("activations", tokens * layer, f"{how}, one layer at a time", "policy")
    passing = tokens * _passing_bytes(rank)
    if config.policy.recompute:
        how = f"{how} of one layer + the layers' inputs (recompute)"
        return _item("activations", saved_bytes(rank) + tokens * layer + passing, how, "policy")
    how = f"{how} x {shape.num_layers} layers"
    return _item("activations", tokens * layer * shape.num_layers + passing, how, "policy")


def saved_bytes(rank: Rank) -> float:
    """Count the layers' inputs, from which activations are recomputed, and the last layer's output."""
    numbers = rank.longest_micro_batch * (rank.shape.num_layers + 1) * rank.shape.hidden_size
    return numbers * rank.dtype_bytes / rank.config.policy.tensor_parallel


def _passing_bytes(rank: Rank) -> float:
    # In the backward pass: gradients of two residuals and of the SwiGLU's output, then of its input; or, before that,
    # of the whole sequence, gathered from the tensor-parallel ranks. On CPUs, what layers keep in float32 is larger.
    if not rank.gpu:
        return 0.0
    parallel, mlp = rank.config.policy.tensor_parallel, rank.shape.active_mlp_size
    gathered = parallel * rank.shape.hidden_size if parallel > 1 else 0
    return (2 * rank.shape.hidden_size + mlp + max(mlp, gathered)) * rank.dtype_bytes / parallel


def _layer_bytes(rank: Rank, *, trainable: bool) -> float:
    shape, config = rank.shape, rank.config
    heads, with_norm = shape.query_size + shape.kv_size, 2 if shape.family.qk_norm else 0
    sharded = (2 + (with_norm if rank.gpu else 0)) * heads + 3 * shape.active_mlp_size
    norms = 0.0
    if not rank.gpu:  # PyTorch's norms keep output and input in float32, and the input exists in float32 anyway
        inputs_and_outputs = 2 if rank.dtype_bytes < FP32 else 1
        norms = FP32 * (inputs_and_outputs * 2 * shape.hidden_size + with_norm * heads)
    if trainable and rank.gpu:
        sharded += 2 * shape.kv_size * (min(config.train.samples_per_prompt, MOST_SHARING) - 1)
    elif trainable:  # keys and values are kept again for each head
        sharded += 2 * shape.query_size
    numbers = sharded + (4 + 2 * shape.experts_per_token) * shape.hidden_size
    return (numbers * rank.dtype_bytes + norms) / config.policy.tensor_parallel


def calibration_items(rank: Rank) -> list[MemoryItem]:
    """Count the policy in Megatron's local layers, which calibration uses on GPUs too, for truncated sequences."""
    config = rank.config
    longest = max(config.precision.calibration_length, config.max_prompt_tokens + 1)
    cut = replace(rank, config=config.updated(model={"max_length": min(longest, config.model.max_length)}))
    columns = rank.shape.vocab_size / config.policy.tensor_parallel
    how = f"{CALIBRATION_POSITIONS} tokens x {columns:.0f} x {FP32} B, of two sets and one pass"
    return [
        *policy_items(cut, trainable=False),
        _item("reference log-probs", 3 * CALIBRATION_POSITIONS * columns * FP32, how),
    ]


def logits(rank: Rank, *, trainable: bool) -> MemoryItem:
    """Count the logits of some tokens of a micro-batch; their gradient overwrites them.

    In addition: two chunks in float32, or the gradient of the output layer; the layer's input and the whole sequence
    that it is taken from, or the input's gradient.
    """
    hidden, columns = rank.shape.hidden_size, rank.shape.vocab_size / rank.config.policy.tensor_parallel
    tokens, size = rank.longest_micro_batch, rank.dtype_bytes
    most = min(tokens * columns, MAX_LOGITS)
    beside = 2 * FP32 * min(most, LOGIT_CHUNK[rank.gpu])
    if trainable:
        beside = max(beside, columns * hidden * size)
    how = f"{most / columns:.0f} tokens x {columns:.0f} x {size} B, beside them float32 or the layer's gradient"
    return _item("logits", most * size + beside + 2 * tokens * hidden * size, how, "policy")


def drafter_items(rank: Rank, *, responses: int) -> list[MemoryItem]:
    """Count the drafter, whole on every rank, and the features that it learns from.

    `responses` are those of all data-parallel ranks together. In pretraining it learns in windows.
    """
    shape, drafter = rank.shape, rank.config.drafter
    count, policy_layer = rank.drafter_parameters, rank.config.speculation.draft_method.is_policy_layer
    # The last hidden state, from which targets are computed, is the only one that the policy's layer reads.
    features = shape.hidden_size * (1 if policy_layer else drafter.num_features + 1)
    vocabulary = shape.vocab_size if policy_layer else drafter.draft_vocab_size
    copies = shape.embedding_parameters + vocabulary * shape.hidden_size
    longest = -(-responses // rank.data_parallel) * rank.config.model.max_length
    budget = drafter.max_tokens_per_window if rank.pretrains else drafter.max_tokens_per_step
    shared = f"the policy's, whole, and its head for {vocabulary} tokens"
    tokens = rank.longest_micro_batch
    if rank.pretrains:
        tokens = max(drafter.tokens_per_micro_batch, rank.config.model.max_length)
    elif rank.config.bubbles.trains_drafter:  # idle ranks choose the size of a micro-batch by its time
        tokens = max(tokens, budget)
    tokens = min(tokens, longest)
    return [
        _item("drafter and its Adam", count * 4 * FP32, f"{count / 1e6:.1f} M parameters x 16 B, not sharded"),
        _item("drafter's embeddings", copies * rank.dtype_bytes, shared),
        drafter_activations(rank, tokens),
        _features(rank, min(max(budget, tokens), longest), features),
    ]


def drafter_activations(rank: Rank, tokens: int) -> MemoryItem:
    """Count one micro-batch of the drafter's training, with its weights and their gradients.

    Every token needs features, norms, keys and values, and their gradients. For every step of the training-time test,
    each draft chain in memory holds the gradient of the logits and what each layer keeps; the temporaries of one step
    are added. All layers but the last also hold as much as one step for every token.
    """
    shape, drafter, size = rank.drafter_shape, rank.config.drafter, rank.dtype_bytes
    hidden, steps = shape.hidden_size, drafter.ttt_steps
    policy_layer = rank.config.speculation.draft_method.is_policy_layer
    vocabulary = shape.vocab_size if policy_layer else drafter.draft_vocab_size
    width = shape.intermediate_size if policy_layer else drafter.intermediate_size or shape.intermediate_size
    layers = 1 if policy_layer else drafter.num_layers
    norms = 2 * FP32 * hidden * (4 if policy_layer else 3)
    layer = norms + size * (6 * hidden + 4 * shape.query_size + 2 * shape.kv_size + 4 * width)
    slot = 4 * FP32 * hidden + size * ((11 if policy_layer else 13) * hidden + 4 * shape.kv_size)
    slot += 2 * shape.kv_size * (size + FP32)  # a part's own copy of the keys and values that it sees, with gradients
    slot += (layers - 1) * (layer + size * (2 * shape.query_size + 4 * shape.kv_size))
    step = layers * layer + size * vocabulary
    chains, parameters = min(tokens, DRAFTER_CHAINS), rank.drafter_parameters
    scores = min(chains * shape.num_heads * rank.config.model.max_length, DRAFTER_SCORES)
    cast = size if size < FP32 else 0
    forward = chains * (steps * step + 7 * FP32 * vocabulary)
    at_once = forward + parameters * (size + cast)
    if not (rank.gpu and cast):  # flash attention keeps no scores
        at_once += round(scores * (2 * FP32 + cast + 1 / shape.num_heads))
    elif not policy_layer:
        # Gradients of keys and values are in the compute type, and the backward pass of all slots comes later. In that
        # of a part, a step is freed once the weights have gradients; the head has two more while they are accumulated.
        # The product that all slots share has ended by then.
        slot -= (FP32 + size) * hidden + 2 * shape.kv_size * (FP32 - size)
        once = parameters - drafter.num_features * hidden * hidden
        backward = chains * (steps - 1) * step + once * size + 2 * size * vocabulary * hidden
        at_once = once * cast + max(forward, backward)
    return _item(
        "drafter's activations",
        tokens * slot + at_once,
        f"{tokens} tokens x {slot / 1024:.0f} KiB, {chains} chains x {steps} steps x {step / 1024:.0f} KiB",
        "drafter",
    )


def _features(rank: Rank, tokens: int, numbers: int) -> MemoryItem:
    # Ranks that train the drafter in idle time keep the features of two more steps (`training/drafter/spot.py`). Ranks
    # that hold one copy of the policy divide the rows, one of which may be as long as the longest sequence.
    config, size = rank.config, numbers * rank.dtype_bytes
    copies = 3 if config.bubbles.trains_drafter and not rank.pretrains else 1
    parallel = config.policy.tensor_parallel * config.policy.pipeline_parallel
    held = tokens if parallel == 1 else min(tokens, tokens / parallel + config.model.max_length)
    how = f"{held:.0f} tokens x {size / 1024:.1f} KiB"
    steps = ", of 3 steps" if copies > 1 else ""
    return _item("drafter's features", copies * held * size, how + steps)


def engine_items(rank: Rank) -> list[MemoryItem]:
    """Count what vLLM needs without its KV cache."""
    if rank.stage not in ENGINE_STAGES:
        return []
    shape, config, size = rank.shape, rank.config, rank.dtype_bytes
    parallel = config.engine.tensor_parallel
    linear = shape.num_layers * shape.linear_parameters_per_layer / parallel
    # Tied or not, its head is a separate matrix.
    count = (shape.num_layers * shape.parameters_per_layer + 2 * shape.embedding_parameters) / parallel
    fp8 = rank.gpu and not rank.pretrains and config.precision.generation == "fp8"
    saved = (size - 1) * linear if fp8 else 0.0
    how = f"{count / 1e9:.2f} G parameters (TP {parallel}) x {size} B{', linear layers x 1 B (FP8)' if fp8 else ''}"
    items = [_item("engine weights", count * size - saved, how)]
    if config.speculation.draft_method.has_weights and not rank.pretrains:
        drafter = rank.drafter_parameters / parallel
        items.append(_item("engine's drafter", drafter * size, f"{drafter / 1e6:.1f} M parameters x {size} B"))
    if rank.gpu and config.engine.compile:
        items.append(_item(GRAPHS, GRAPHS_GIB * GIB, "assumed"))
    longest = 0 if rank.pretrains else max(config.speculation.draft_lengths)
    batched = batched_tokens(config.engine.max_num_seqs, longest)
    verified = config.engine.max_num_seqs * (longest + 1)
    hidden = batched * (4 * shape.hidden_size + 3 * shape.active_mlp_size / parallel) * size
    scores = max(verified * shape.vocab_size * 3 * FP32, PROBE_TOKENS * shape.vocab_size * SCORED_BYTES)
    how = f"{batched} batched tokens, {verified} rows of logits"
    return [*items, _item("engine workspace", hidden + scores, how, "generation")]


def kv_bytes_per_token(rank: Rank) -> float:
    """Count the keys and values of one token on one rank, including the drafter's, which are never in FP8."""
    size = 1 if rank.config.precision.kv_cache == "fp8" and not rank.pretrains else rank.dtype_bytes
    method = rank.config.speculation.draft_method
    layers = rank.config.drafter.num_layers if not method.is_policy_layer else 1
    drafter = layers * rank.dtype_bytes if method.has_weights else 0

    def channels(shape: ModelShape) -> float:  # at least one head per rank
        return max(shape.num_kv_heads / rank.config.engine.tensor_parallel, 1) * shape.head_dim

    return 2 * (rank.shape.num_layers * size * channels(rank.shape) + drafter * channels(rank.drafter_shape))


def vocabulary_bytes(shape: ModelShape, policy: PolicyConfig, element_size: int) -> int:
    """Count the bytes of the whole embeddings, padded so that tensor-parallel ranks share them evenly."""
    ranks = policy.tensor_parallel
    return -(-shape.vocab_size // ranks) * ranks * shape.hidden_size * element_size


def refit_item(rank: Rank) -> MemoryItem:
    """Count the largest tensor in flight (the embeddings), or the module that the engine is collecting.

    vLLM keeps the whole tensors of a module, such as all experts of a layer, until the last has arrived, and then
    builds its own part of the module in the compute type. A rank that holds the whole policy hands out its parameters.
    """
    shape, policy, size = rank.shape, rank.config.policy, rank.dtype_bytes
    vocabulary = vocabulary_bytes(shape, policy, size)
    if max(policy.tensor_parallel, policy.pipeline_parallel, policy.expert_parallel) == 1:
        return _item("refit buffer", vocabulary, "tensors on their way", "refit")
    attention = shape.hidden_size * (shape.query_size + 2 * shape.kv_size)
    mlp = shape.expert_parameters_per_layer or 2 * shape.hidden_size * shape.intermediate_size
    module = max(attention, mlp) * size
    waiting = module + module / rank.config.engine.tensor_parallel + min(module, TENSOR_BYTES)
    how = f"tensors on their way, or a module of {module / GIB:.2f} GiB that the engine waits for"
    return _item("refit buffer", max(vocabulary * (1 + 1 / policy.tensor_parallel), waiting), how, "refit")


def policy_state_bytes(config: Config) -> int:
    """The bytes per policy parameter in a checkpoint, which includes a reference that is renewed."""
    return MASTER_AND_MOMENTS + (FP32 if config.train.renews_reference else 0)


def copy_items(rank: Rank) -> list[MemoryItem]:
    """Count each rank's copies from which a checkpoint is written during the next step, and the last good drafter."""
    width = policy_state_bytes(rank.config)
    how = f"{width} B per parameter, this rank's part of the optimizer"
    items = [_item("checkpoint copy", rank.optimizer_parameters * width, how)]
    if rank.config.speculation.draft_method.has_weights:
        size, how = rank.drafter_parameters * MASTER_AND_MOMENTS, f"{MASTER_AND_MOMENTS} B per parameter, not sharded"
        items += [_item("last good drafter", size, how), _item("checkpoint copy of the drafter", size, how)]
    return items


def _item(name: str, size: float, how: str, phase: str | None = None) -> MemoryItem:
    return MemoryItem(name, size / GIB, how, phase)
