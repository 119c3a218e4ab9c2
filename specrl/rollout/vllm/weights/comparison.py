"""Compare an engine's weights with the trainer's tensors by means of small tensors.

A matrix is compared by its products with fixed random rows, because CPU engines keep only packed matrices, and an
expert by its outputs for such rows; an embedding, and an FP8 matrix with its scales, by an exact sum of each row;
everything else by value. Expected values are recorded while the trainer's tensors pass to the engine, so that nothing
is sent twice. A tensor damaged before it leaves the trainer is detected by the probe's log-probs, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrl.models.directory import HEAD
from specrl.models.families import LLAMA, Family
from specrl.rollout.errors import DrafterCollapseError, PolicyParityError
from specrl.rollout.vllm.precision import NATIVE_METHODS
from specrl.rollout.vllm.weights.experts import EXPERT, PARTS, expected_output, outputs_of_experts
from specrl.rollout.vllm.weights.load import NOT_LOADED, Weights

PROBE_ROWS = 4
"""The number of random inputs on which a matrix is compared. A second one costs next to nothing, because reading the
matrix takes the time."""
CHUNK_ROWS = 1024
"""The number of an embedding's rows summed at a time, few enough to stay in the cache."""
READ_BACK_TOLERANCE = 0.02
"""The largest difference of an output, relative to its own size plus the root mean square of its row; BF16 rounds to
a relative 2^-9."""
MOST_NAMED = 20
"""The maximum number of tensors that an error names: in a stale policy all are wrong."""


IsHeld = Callable[[], bool]
"""Whether an engine holds the expected values at one place."""


class Place(NamedTuple):
    """Where an engine holds one or more of the trainer's tensors."""

    layer: str
    kind: str | int
    """The name of the layer's parameter, or the number of an expert, whose matrices share one place."""


class Expected:
    """The expected weights of a model inside the engine, or of this rank's part, recorded from the trainer's tensors.

    A tensor is kept only until the fused layer or expert to which it belongs is complete.
    """

    def __init__(self, model: nn.Module, family: Family, *, policy: nn.Module | None = None) -> None:
        """Begin with nothing recorded.

        Args:
            family: The policy's family, which determines what the engine fuses. An EAGLE-3 drafter is a Llama model
                with any policy.
            policy: The policy inside the engine if `model` is its drafter (EAGLE-3, or the policy's
                multi-token-prediction layer), whose embeddings must be the policy's.
        """
        self._model, self._family, self._policy = model, family, policy
        self._like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
        self._places: list[tuple[tuple[str, ...], IsHeld]] = []
        """The names of the trainer's tensors at each place, and the check that they are there."""
        self._experts: tuple[nn.Module, Tensor] | None = None
        """The layer whose experts were compared last, and their outputs; all layers' may take hundreds of MiB."""

    def noted(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Record the trainer's tensors as they arrive, and yield each one."""
        waiting: dict[Place, dict[int, tuple[str, Tensor]]] = {}
        for name, tensor in weights:
            if name not in NOT_LOADED:
                place, leaf, order = self._place(name)
                parts = waiting.setdefault(place, {})
                parts[order.index(leaf)] = name, tensor
                if len(parts) == len(order):
                    self._note(place, waiting.pop(place))
            yield name, tensor
        for place, parts in waiting.items():
            self._note(place, parts)

    def take(self, weights: Weights) -> None:
        """Record the trainer's tensors without passing them on."""
        for _ in self.noted(weights):
            pass

    @torch.inference_mode()
    def check(self) -> None:
        """Check that the model computes with the trainer's tensors.

        Raises:
            PolicyParityError: Some of the policy's tensors differ; the error names them.
            DrafterCollapseError: Some of the drafter's tensors differ.
        """
        self._experts = None
        wrong = [name for names, is_held in self._places if not is_held() for name in names]
        if self._policy is not None:
            models: tuple[Any, Any] = self._model, self._policy
            own, shared = (model.get_submodule("model.embed_tokens").weight for model in models)
            if own is not shared and not torch.equal(own, shared):
                wrong.append("embed_tokens.weight")
        if wrong:
            error, name = (PolicyParityError, "policy") if self._policy is None else (DrafterCollapseError, "drafter")
            more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
            raise error(f"the engine's {name} differs from the trainer's in {', '.join(wrong[:MOST_NAMED])}{more}")

    def _place(self, name: str) -> tuple[Place, str, list[str]]:
        family, fused = self._family, self._family.fused
        if family.mtp is not None and name.startswith(family.mtp.prefix):
            config: Any = self._model.config
            return _engine_place(family.mtp.name_in_engine(name, config.num_hidden_layers), fused)
        is_drafter = self._policy is not None
        return _engine_place(_eagle3_engine_name(name), LLAMA.fused) if is_drafter else _engine_place(name, fused)

    @torch.inference_mode()
    def _note(self, place: Place, parts: Mapping[int, tuple[str, Tensor]]) -> None:
        names, tensors = zip(*(parts[index] for index in sorted(parts)), strict=True)
        try:
            layer = self._model.get_submodule(place.layer)
        except AttributeError:
            is_held = _never
        else:
            is_held = self._held(layer, place.kind, tensors)
        self._places.append((names, is_held))

    def _held(self, layer: Any, kind: str | int, tensors: Sequence[Tensor]) -> IsHeld:
        if isinstance(kind, int):
            return self._held_expert(layer, kind, tensors)
        parts = own_parts(layer, kind, tensors)
        if kind == "weight" and _multiplies(layer):
            # The engine converts what it loads to its own type: a run in FP32 may begin with a drafter of one in BF16.
            parts = [part.to(self._like.dtype) for part in parts]
            if type(layer.quant_method).__name__ in NATIVE_METHODS:  # its parameters do not show this during loading
                bits = _bits(_quantised(layer, parts, self._like.device))
                return lambda: torch.equal(_bits(layer), bits)
            inputs = probe_rows(parts[0].shape[1], parts[0])
            products = _expected_products(layer, inputs, parts)
            return lambda: _are_equal(self._applied(layer, inputs)[:, : products.shape[1]], products)
        if (actual := getattr(layer, kind, None)) is None:
            return _never
        sums = _summed((torch.cat(parts) if len(parts) > 1 else parts[0]).to(actual.dtype))
        return lambda: torch.equal(_summed(getattr(layer, kind))[: len(sums)].to(sums.device), sums)

    def _held_expert(self, layer: Any, number: int, tensors: Sequence[Tensor]) -> IsHeld:
        if len(tensors) < len(PARTS):
            return _never
        matrices = [tensor.to(self._like.dtype) for tensor in tensors]
        # All experts' outputs are kept at once, so they are not in float32, which would take twice the memory.
        inputs = probe_rows(matrices[0].shape[1], matrices[0])
        expected = expected_output(layer, matrices, inputs).to(self._like.dtype)
        return lambda: _are_equal(self._outputs_of(layer, inputs)[number], expected)

    def _outputs_of(self, layer: Any, inputs: Tensor) -> Tensor:
        if self._experts is None or self._experts[0] is not layer:
            self._experts = layer, outputs_of_experts(layer, inputs.to(self._like))
        return self._experts[1]

    def _applied(self, layer: Any, inputs: Tensor) -> Tensor:
        output: Tensor = layer.quant_method.apply(layer, inputs.to(self._like), None)
        return output


def own_parts(layer: nn.Module, kind: str, parts: Sequence[Tensor]) -> list[Tensor]:
    """Cut this rank's parts out of the tensors that a layer fuses, which it stacks in this order.

    Keys and values are repeated if there are more ranks than KV heads.

    Args:
        kind: The name of the parameter: `weight`, `bias` or another one.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    place: Any = layer
    if isinstance(layer, VocabParallelEmbedding):
        first, end = place.shard_indices.org_vocab_start_index, place.shard_indices.org_vocab_end_index
        return [part[int(first) : int(end)] for part in parts]
    if isinstance(layer, RowParallelLinear) and kind != "bias":
        return [part.chunk(int(place.tp_size), 1)[int(place.tp_rank)] for part in parts]
    if isinstance(layer, ColumnParallelLinear):
        replicas = [1] + [getattr(layer, "num_kv_head_replicas", 1)] * (len(parts) - 1)
        size, rank, owned = int(place.tp_size), int(place.tp_rank), zip(parts, replicas, strict=True)
        return [part.chunk(size // times)[rank // times] for part, times in owned]
    return list(parts)


def _never() -> bool:
    return False


def _engine_place(name: str, fused: Mapping[str, str]) -> tuple[Place, str, list[str]]:
    """The place of a tensor, the name of its part there, and the names of all parts in order."""
    if (expert := EXPERT.fullmatch(name)) is not None:
        return Place(f"{expert['experts']}.routed_experts", int(expert["number"])), expert["part"], list(PARTS)
    path, _, kind = name.rpartition(".")
    parent, _, leaf = path.rpartition(".")
    order = [other for other, into in fused.items() if into == fused.get(leaf)] or [leaf]
    return Place(f"{parent}.{fused.get(leaf, leaf)}".lstrip("."), kind), leaf, order


def _eagle3_engine_name(name: str) -> str:
    if name == HEAD:
        return name
    if name == "d2t":
        return "draft_id_to_target_id"
    return "model." + name.replace("midlayer.", "layers.0.")


def _expected_products(layer: Any, inputs: Tensor, parts: list[Tensor]) -> Tensor:
    """The products [inputs, out] of inputs with a weight [out, in] that consists of these parts along `out`.

    For a layer in emulated FP8 both are quantised, because rounding changes products by more than the tolerance.
    """
    method = layer.quant_method
    if hasattr(method, "quantise_matrix"):
        inputs, parts = method.quantise_inputs(inputs), [method.quantise_matrix(part) for part in parts]
    return torch.cat([F.linear(inputs, part) for part in parts], -1)


def _quantised(layer: Any, parts: Sequence[Tensor], device: torch.device) -> Any:
    """A copy of a layer with a weight of these parts on `device`, quantised by vLLM as it quantises the layer's own.

    During a reload the layer's own parameters are on no device, and not yet in FP8.
    """
    made = copy(layer)
    # Changes to the copy must not affect the layer.
    made._parameters, made._buffers = {}, dict(layer._buffers)
    # vLLM's own class: for another one, torch would use other kernels, compiled for each shape as long as it may.
    made.weight = torch.cat(list(parts)).to(device).as_subclass(type(layer.weight))
    made._already_called_process_weights_after_loading = False
    layer.quant_method.process_weights_after_loading(made)
    return made


def _bits(layer: Any) -> Tensor:
    """Exact sums of the rows of an FP8 weight and of its scales, int64 [rows + rows of blocks]."""
    return torch.cat([_summed(layer.weight), _summed(layer.weight_scale_inv)])


def _are_equal(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    found, reference = actual.float(), expected.to(actual.device).float()
    scale = reference.abs() + reference.pow(2).mean(-1, keepdim=True).sqrt()
    return bool(((found - reference).abs() <= READ_BACK_TOLERANCE * scale).all())


def probe_rows(width: int, like: Tensor) -> Tensor:
    """The fixed random inputs of a matrix, [PROBE_ROWS, width], in the type and on the device of `like`."""
    return torch.randn(PROBE_ROWS, width, generator=torch.Generator().manual_seed(0)).to(like)


def _summed(tensor: Tensor) -> Tensor:
    """A copy of a tensor or, for a matrix [rows, columns], a sum for each row, int64 [rows].

    It sums the row's bits, in 64-bit words, times fixed random odd numbers, modulo 2^64: it is exact in any order of
    additions, and every change of a single word changes it.
    """
    if tensor.dim() != 2:
        return tensor.detach().clone()
    fits = tensor.shape[1] * tensor.element_size() % 8 == 0
    rows = tensor.detach().contiguous()
    if rows.storage_offset() * rows.element_size() % 8:
        rows = rows.clone()
    words = rows.view(torch.int64 if fits else torch.uint8)
    factors = _factors(words.shape[1]).to(words.device)
    return torch.cat([(chunk * factors).sum(-1) for chunk in torch.split(words, CHUNK_ROWS)])


@cache
def _factors(count: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0)) | 1


def _multiplies(layer: nn.Module) -> bool:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(layer, (LinearBase, ParallelLMHead))
