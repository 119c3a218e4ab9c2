"""The recipe of CONTRIBUTING.md for a model family: its one row is enough for everything that reads families."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specrl.config import ConfigError, ModelConfig, PolicyConfig
from specrl.distributed import Ranks, join, leave
from specrl.models import families
from specrl.models.families import FAMILIES, Family
from specrl.models.shapes import model_shape
from specrl.models.sources import check_source, materialise_model
from specrl.precision.recipe import Recipe, layer_names
from specrl.training.batches import TokenSequence, pack
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy
from tests.contributing import blocks

NUM_LAYERS = 6
TOKENS = [4, 90, 17, 33, 8, 8, 61, 5, 70, 12, 44, 3]


@pytest.fixture(scope="module")
def family() -> Iterator[Family]:
    before = dict(FAMILIES)
    [row] = [block.text for block in blocks("A model family") if block.language == "python"]
    exec(row, vars(families))
    [name] = FAMILIES.keys() - before.keys()
    yield FAMILIES[name]
    del FAMILIES[name]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


def tiny(family: Family, **shape: Any) -> ModelConfig:
    sizes = {"num_layers": NUM_LAYERS, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1}
    values = {"source": "tiny", "dtype": "float32", "max_length": 128, "tiny": {"family": family.name} | sizes | shape}
    return ModelConfig.model_validate(values)


@pytest.fixture(scope="module")
def policy_dir(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the new family whose norms and biases differ from their defaults."""
    directory = materialise_model(tiny(family), 0, tmp_path_factory.mktemp("models") / "policy")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_the_source_check_knows_the_family_by_its_row(policy_dir: Path, family: Family) -> None:
    config = ModelConfig(source=str(policy_dir), max_length=128)
    check_source(config)
    del FAMILIES[family.name]
    try:
        with pytest.raises(
            ConfigError, match=f"unsupported architecture: {family.architecture}; supported: LlamaForCausalLM"
        ):
            check_source(config)
        with pytest.raises(ConfigError, match=r"model\.tiny\.family = .*: allowed are llama"):
            check_source(tiny(family))
    finally:
        FAMILIES[family.name] = family


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_the_parameters_that_transformers_makes(family: Family, tied: bool, tmp_path: Path) -> None:
    config = tiny(family, tie_embeddings=tied)
    directory = materialise_model(config, 0, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert type(model).__name__ == family.architecture
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert model_shape(config).parameters == expected
    assert model_shape(ModelConfig(source=str(directory), max_length=128)).parameters == expected


@torch.no_grad()
def test_the_policy_computes_what_transformers_does_and_gives_the_same_bits_back(
    policy_dir: Path, ranks: Ranks, tmp_path: Path
) -> None:
    policy = Policy(policy_dir, PolicyConfig(), dtype="float32", ranks=ranks, seed=0, trainable=False)
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    [found] = policy.logprobs(pack([TokenSequence(TOKENS, 1, 0)], len(TOKENS)))
    logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(found[0], expected, atol=2e-5, rtol=0)
    policy.save_pretrained(tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (policy_dir, tmp_path / "saved"))
    assert before.keys() == after.keys() and any(name.endswith("q_proj.bias") for name in before)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_the_fp8_recipe_names_the_layers_of_trainer_and_engine(policy_dir: Path, family: Family, ranks: Ranks) -> None:
    precision = LinearPrecision()
    policy = Policy(policy_dir, PolicyConfig(), dtype="float32", ranks=ranks, seed=0, trainable=False, fp8=precision)
    policy.logprobs(pack([TokenSequence(TOKENS, 1, 0)], len(TOKENS)))
    precision.assert_quantised()
    assert set(precision.linears) == set(layer_names(family, NUM_LAYERS))
    engine_layers = Recipe(family, NUM_LAYERS).engine_layers
    assert len(set(engine_layers)) == len(precision.linears)
    assert engine_layers[0] == "model.layers.0.self_attn.qkv_proj"
