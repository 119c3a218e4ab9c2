"""Models with multi-token-prediction layers: on disk, in the trainer, unrolled as it drafts, apart from the policy."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from flows.preflight import check_model
from specrl.config import Config, ConfigError, DrafterConfig, ModelConfig, PolicyConfig
from specrl.distributed import Ranks, join, leave
from specrl.export.card import serve_command
from specrl.models.shapes import model_shape
from specrl.models.sources import check_source, load_tokenizer, materialise_model
from specrl.projection.memory import Rank
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.drafter.chains import pack_chains
from specrl.training.drafter.drafters import save_drafter
from specrl.training.drafter.spot import SpotTraining
from specrl.training.drafter.trainer import Drafter
from specrl.training.drafter.ttt import feed_context, target_probs, unroll
from specrl.training.megatron.policy import Policy
from tests.mtp_models import (
    FAMILIES,
    PREFIX,
    LiteralMtp,
    greedy_features,
    last_hidden,
    mtp_weights,
    trunk,
    write_mtp_model,
)

# isort: split
from megatron.core import parallel_state

STEPS = 4
in_each_family = pytest.mark.parametrize("policy_dir", list(FAMILIES), indirect=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def policy_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = getattr(request, "param", "mimo")
    return write_mtp_model(tmp_path_factory.mktemp("models") / family, family)


@pytest.fixture(scope="module")
def policy(policy_dir: Path, ranks: Ranks) -> Policy:
    return Policy(policy_dir, PolicyConfig(lr=1e-3), dtype="float32", ranks=ranks, seed=0)


def batches() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(128, (length,), generator=generator).tolist() for length in (9, 30, 17, 22)]
    return pack([TokenSequence(row, 4, index) for index, row in enumerate(rows)], 60)


def loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs.sum() / 60, {}


def test_mimo_is_a_qwen2_to_transformers(policy_dir: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(policy_dir, output_loading_info=True)
    assert isinstance(model, Qwen2ForCausalLM)
    assert not report["missing_keys"]
    assert report["unexpected_keys"] == set(mtp_weights(policy_dir))


@in_each_family
def test_the_trainer_computes_the_policy_without_its_layers(policy_dir: Path, policy: Policy) -> None:
    model = trunk(policy_dir)
    logprobs = policy.logprobs(batches())
    for batch, found in zip(batches(), logprobs, strict=True):
        for places, length, row, mask in zip(batch.places(), batch.lengths, found, batch.mask, strict=True):
            tokens = batch.tokens[places[:length]]
            with torch.no_grad():
                logits = model(tokens[None]).logits[0]
            expected = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[3:, 0]
            torch.testing.assert_close(row[mask], expected, atol=1e-4, rtol=0)


@in_each_family
def test_the_features_are_the_residual_stream_before_the_final_norm(policy_dir: Path, policy: Policy) -> None:
    drafter = Drafter.of_policy(policy_dir, DrafterConfig(), policy.ranks)
    for features in policy.forward_features(batches(), drafter.feature_layers):
        hidden, logits = last_hidden(trunk(policy_dir), features.tokens)
        torch.testing.assert_close(features.hidden[features.mask], hidden[features.mask], atol=1e-4, rtol=0)
        found = drafter.model.policy_logits(features.hidden[features.mask])
        torch.testing.assert_close(found, logits[features.mask], atol=1e-3, rtol=0)


@in_each_family
def test_unrolled_training_equals_literal_drafting_at_every_step(policy_dir: Path, ranks: Ranks) -> None:
    drafter = Drafter.of_policy(policy_dir, DrafterConfig(ttt_steps=STEPS), ranks)
    prompts = torch.randint(128, (3, 3), generator=torch.Generator().manual_seed(4))
    features = greedy_features(policy_dir, prompts, 9)
    batch = pack_chains(features, drafter.draft_tokens, 128, STEPS)
    assert batch is not None
    [part] = batch.parts()
    with torch.no_grad():
        found = list(unroll(drafter.model, batch, feed_context(drafter.model, batch), part))
    literal = LiteralMtp(policy_dir, mtp_weights(policy_dir))
    expected: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for row in range(3):
        for start in range(2, 2 + 9 - 1):
            tokens, steps = features.tokens[row].tolist(), min(STEPS, 2 + 9 - 1 - start)
            chain = literal.chain(tokens, features.hidden[row], start, steps, forced=True)
            for step, logits in enumerate(chain):
                expected[step].append(logits)
    for step in range(STEPS):
        torch.testing.assert_close(found[step], torch.stack(expected[step]), rtol=1e-4, atol=1e-3)
    probs = target_probs(drafter.model, batch, part)
    torch.testing.assert_close(probs.argmax(-1), batch.target_top1)


def test_slot_0_has_no_embedding_in_mimo(policy_dir: Path, ranks: Ranks) -> None:
    model = Drafter.of_policy(policy_dir, DrafterConfig(), ranks).model
    embedded = model.embed(torch.tensor([7, 7]), torch.tensor([0, 1]))
    assert embedded[0].abs().max() == 0 and embedded[1].abs().max() > 0


@pytest.mark.parametrize(
    ("family", "dtype", "layers"),
    [
        *(("mimo", "float32", 1), ("mimo", "bfloat16", 3)),
        *(("exaone_moe", "float32", 2), ("exaone_moe", "bfloat16", 1), ("ernie4_5_moe", "bfloat16", 1)),
    ],
)
def test_the_layers_come_back_bit_by_bit_with_and_without_a_drafter(
    tmp_path: Path, ranks: Ranks, family: str, dtype: str, layers: int
) -> None:
    source = write_mtp_model(tmp_path / "source", family, layers=layers, dtype=dtype)
    policy = Policy(source, PolicyConfig(), dtype=dtype, ranks=ranks, seed=0, trainable=False)
    drafter = Drafter.of_policy(source, DrafterConfig(), ranks)
    policy.save_pretrained(tmp_path / "carried")
    save_drafter(drafter, policy, tmp_path / "given", policy_version=0)
    expected = load_file(source / "model.safetensors")
    for name in ("carried", "given"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(
            torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in expected.items()
        )
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["architectures"] == json.loads((source / "config.json").read_text())["architectures"]
        assert written["num_nextn_predict_layers"] == layers


@in_each_family
def test_the_layer_learns_and_leaves_every_policy_gradient_exactly_as_it_is(policy_dir: Path, policy: Policy) -> None:
    drafter = Drafter.of_policy(policy_dir, DrafterConfig(lr=3e-3), policy.ranks)

    def gradients(layers: tuple[int, ...] | None) -> tuple[dict[str, Tensor], list[Any]]:
        _, features = policy.train_step(batches(), loss, features=layers, lr=0.0)
        return {name: p.main_grad.clone() for name, p in policy.model.named_parameters()}, features

    without, _ = gradients(None)
    with_features, features = gradients(drafter.feature_layers)
    assert max(gradient.abs().max() for gradient in without.values()) > 0
    policy.optimizer.zero_grad()
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    with torch.inference_mode():  # as a refit does
        for name, tensor in policy.hf_weights():
            drafter.share(name, tensor)
    first = drafter.update(features, lr=0.0)
    metrics = drafter.update(features, lr=3e-3, epochs=15)
    assert metrics["loss"] < 0.9 * first["loss"] and metrics["grad_norm"] > 0
    assert all(torch.equal(with_features[name], gradient) for name, gradient in without.items())
    for name, parameter in policy.model.named_parameters():
        assert not parameter.main_grad.any(), name
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.hf_weights())
    moved = dict(drafter.named_weights())
    assert moved.keys() == mtp_weights(policy_dir).keys()
    assert all(not torch.equal(moved[name], tensor) for name, tensor in mtp_weights(policy_dir).items())


def test_idle_ranks_train_the_layer_too(policy_dir: Path, policy: Policy) -> None:
    drafter = Drafter.of_policy(policy_dir, DrafterConfig(online_lr=1e-4), policy.ranks)
    spot = SpotTraining(drafter)
    spot.remember(policy.forward_features(batches(), drafter.feature_layers))
    assert spot.work(lambda: False)
    assert spot.merge()["loss"] > 0
    assert not torch.equal(
        drafter.model.get_parameter("input_proj.weight"), mtp_weights(policy_dir)[f"{PREFIX}input_proj.weight"]
    )


def test_what_is_shared_follows_the_policy(policy_dir: Path, ranks: Ranks) -> None:
    drafter = Drafter.of_policy(policy_dir, DrafterConfig(), ranks)
    weights = {name: torch.randn_like(tensor) for name, tensor in load_file(policy_dir / "model.safetensors").items()}
    kept = dict(drafter.named_weights())
    for name, tensor in weights.items():
        drafter.share(name, tensor)
    for name, attribute in drafter.model.SHARED.items():
        assert torch.equal(getattr(drafter.model, attribute), weights[name])
    assert all(torch.equal(kept[name], tensor) for name, tensor in drafter.named_weights())


def published(directory: Path, target: Path, **changes: Any) -> ModelConfig:
    """The same model as its authors write it: its own type, and remote code."""
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    own = {"model_type": "mimo", "attention_bias": True, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (target / "config.json").write_text(json.dumps(config | own | changes))
    return ModelConfig(source=str(target), max_length=64)


def test_a_published_directory_is_written_as_the_qwen2_that_it_is(
    policy_dir: Path, tmp_path: Path, ranks: Ranks
) -> None:
    made = materialise_model(published(policy_dir, tmp_path / "published"), 0, tmp_path / "made")
    config = json.loads((made / "config.json").read_text())
    assert config["model_type"] == "qwen2" and config["architectures"] == ["MiMoForCausalLM"]
    assert not {"auto_map", "attention_bias"} & config.keys()
    assert load_tokenizer(made).encode("1 + 2") == load_tokenizer(policy_dir).encode("1 + 2")
    Policy(made, PolicyConfig(), dtype="float32", ranks=ranks, seed=0, trainable=False)
    assert set(dict(Drafter.of_policy(made, DrafterConfig(), ranks).named_weights())) == set(mtp_weights(policy_dir))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        (
            {"architectures": ["ExaoneMoeForCausalLM"], "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4},
            'mlp_layer_types = "sparse" in 4 of 6 layers .* must be "dense"',
        ),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"]}, "moe_layer_start_index = 0 .* at least num_hidden_layers = 6"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM .*gated delta nets.*; supported: .*MiMo"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_one_line(
    policy_dir: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_source(published(policy_dir, tmp_path / "published", **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("family", "fits"), [*((family, True) for family in FAMILIES), ("qwen2", False)])
def test_mtp_needs_a_model_with_the_layer(family: str, fits: bool) -> None:
    model = {"source": "tiny", "tiny": {"family": family}, "dtype": "float32", "max_length": 256}
    config = Config.model_validate({"name": "x", "model": model, "speculation": {"method": "mtp"}})
    lines = [line for line in check_model(config) if "mtp" in line]
    assert bool(lines) != fits
    assert fits or ('speculation.method = "mtp"' in lines[0] and "eagle3" in lines[0])


@pytest.mark.parametrize(("family", "fits"), [("qwen2", True), *((family, False) for family in FAMILIES)])
def test_an_eagle3_drafter_needs_a_policy_whose_hidden_states_vllm_hands_out(family: str, fits: bool) -> None:
    model = {"source": "tiny", "tiny": {"family": family}}
    config = Config.model_validate({"name": "x", "model": model, "drafter": {"draft_vocab_size": 64}})
    lines = [line for line in check_model(config) if "EAGLE-3" in line]
    assert bool(lines) != fits
    assert fits or (
        'speculation.method = "eagle3"' in lines[0] and "allowed are none, mtp, mtp+replay, ngram" in lines[0]
    )


@pytest.mark.parametrize(
    ("layers", "k", "fits"), [(1, 3, True), (2, 1, True), (2, 4, True), (2, 3, False), (4, 3, True)]
)
def test_drafts_longer_than_the_layers_are_multiples_of_their_number(layers: int, k: int, fits: bool) -> None:
    """As vLLM wants it (`SpeculativeConfig`)."""
    tiny = {"source": "tiny", "tiny": {"family": "mimo", "mtp_layers": layers}}
    config = Config.model_validate({"name": "x", "model": tiny, "speculation": {"method": "mtp", "k": k}})
    lines = [line for line in check_model(config) if "speculation.k" in line]
    assert bool(lines) != fits
    assert fits or (f"speculation.k = {k}" in lines[0] and "allowed are 1 to 2, 4, 6" in lines[0])


def test_a_directory_without_the_layer_is_refused_for_mtp(policy_dir: Path, tmp_path: Path) -> None:
    other = published(policy_dir, tmp_path / "qwen2", architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    config = Config.model_validate(
        {
            "name": "x",
            "model": {"source": other.source, "max_length": 128},
            "sampling": {"max_response_tokens": 40},
            "speculation": {"method": "mtp"},
        }
    )
    [line] = [line for line in check_model(config) if "speculation.method" in line]
    assert str(tmp_path / "qwen2") in line
    with pytest.raises(ValueError, match=PREFIX):
        Drafter.of_policy(without_layer(policy_dir, tmp_path), DrafterConfig(), Ranks(0, 1, 0, torch.device("cpu")))


@in_each_family
def test_planned_parameters_are_the_layers(policy_dir: Path, ranks: Ranks) -> None:
    shape = {"family": policy_dir.name, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1}
    config = Config.model_validate(
        {"name": "x", "model": {"source": "tiny", "tiny": shape}, "speculation": {"method": "mtp"}}
    )
    layer = Drafter.of_policy(policy_dir, DrafterConfig(), ranks).model
    planned = Rank(model_shape(config.model), config, gpu=0, data_parallel=1).drafter_parameters
    assert planned == sum(parameter.numel() for parameter in layer.parameters())


def test_the_policys_directory_alone_is_served() -> None:
    config = Config.model_validate({"name": "x", "speculation": {"method": "mtp", "k": 3}})
    command = shlex.split(serve_command(Path("/run/export/policy"), Path("/run/export/policy"), 3, config))
    assert command[:4] == ["vllm", "serve", "/run/export/policy", "--speculative-config"]
    assert json.loads(command[4]) == {"method": "mtp", "num_speculative_tokens": 3}


def without_layer(policy_dir: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "without"
    shutil.copytree(policy_dir, directory)
    weights = {name: tensor for name, tensor in load_file(directory / "model.safetensors").items() if "mtp" not in name}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_tied_tiny_mimo_is_refused() -> None:
    with pytest.raises(ValueError, match="tie_embeddings"):
        check_source(ModelConfig.model_validate({"source": "tiny", "tiny": {"family": "mimo", "tie_embeddings": True}}))
