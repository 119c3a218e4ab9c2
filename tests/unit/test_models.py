from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from specrl.config import ConfigError, ModelConfig, TinyModelConfig
from specrl.models.checks.folder import check_model_folder
from specrl.models.sources import check_source, load_tokenizer, materialise_model
from specrl.models.tiny import CHARACTERS

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def tiny(**shape: Any) -> ModelConfig:
    return ModelConfig(source="tiny", dtype="float32", max_length=128, tiny=TinyModelConfig(**shape))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialise_model(tiny(), 0, tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tiny_models_load_in_transformers_and_ties_are_kept_on_disk(tmp_path: Path, family: str, tied: bool) -> None:
    made = materialise_model(tiny(family=family, tie_embeddings=tied), 0, tmp_path / "model")
    model, report = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert ("lm_head.weight" in load_file(made / "model.safetensors")) == (not tied)
    assert model.config.tie_word_embeddings == tied
    assert model.config.head_dim >= 32 if family != "qwen2" else True
    assert model.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_the_character_tokenizer_is_exact_for_every_family(tmp_path: Path, family: str) -> None:
    tokenizer = load_tokenizer(materialise_model(tiny(family=family), 0, tmp_path / "model"))
    tokens = tokenizer.encode(CHARACTERS)
    assert len(tokens) == len(CHARACTERS)
    assert tokenizer.decode(tokens) == CHARACTERS
    assert tokenizer.encode("  Q: 1 + 2\n\nA: it's") == [tokenizer.encode(c)[0] for c in "  Q: 1 + 2\n\nA: it's"]
    assert tokenizer.eos_token_id not in tokens


def test_tiny_weights_follow_the_seed_and_leave_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    weights = [
        load_file(materialise_model(tiny(), seed, tmp_path / name) / "model.safetensors")
        for seed, name in ((0, "a"), (0, "b"), (1, "c"))
    ]
    assert torch.equal(torch.rand(1), expected)
    key = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[0][key], weights[1][key])
    assert not torch.equal(weights[0][key], weights[2][key])


def test_a_complete_directory_is_left_as_it_is(directory: Path) -> None:
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert materialise_model(tiny(), 99, directory) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def test_what_a_killed_job_has_begun_is_begun_again_and_does_not_stay(tmp_path: Path) -> None:
    for name in (".policy.tmp", f".policy.{os.getpid()}.tmp"):  # in containers, the ids of processes repeat
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"the beginning")
    check_model_folder(materialise_model(tiny(), 0, tmp_path / "policy"), 128)
    assert not (tmp_path / ".policy.tmp").exists()


def test_an_existing_directory_is_copied_with_its_weights_linked(directory: Path, tmp_path: Path) -> None:
    config = ModelConfig(source=str(directory), max_length=128)
    made = materialise_model(config, 0, tmp_path / "stage" / "policy")
    assert (made / "model.safetensors").is_symlink()
    assert not (made / "config.json").is_symlink()
    assert load_tokenizer(made).encode("a") == load_tokenizer(directory).encode("a")
    assert AutoModelForCausalLM.from_pretrained(made).config.vocab_size == 128


def test_the_configuration_of_a_linked_model_names_the_type_that_the_run_computes_in(
    directory: Path, tmp_path: Path
) -> None:
    source = broken(directory, tmp_path / "source", dtype="float32").source
    dtypes: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
    for dtype in dtypes:
        materialise_model(ModelConfig(source=source, dtype=dtype, max_length=128), 0, made := tmp_path / dtype)
        assert str(AutoConfig.from_pretrained(made).dtype) == f"torch.{dtype}"


def test_the_tokenizer_of_a_policy_is_its_file_whatever_class_its_settings_name(
    directory: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(directory, tmp_path / "source"))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizerFast"}))
    text = "2 + 3 is\n5"
    assert load_tokenizer(source).decode(load_tokenizer(source).encode(text)) != text  # as AutoTokenizer has it
    made = materialise_model(ModelConfig(source=str(source), max_length=128), 0, tmp_path / "policy")
    assert load_tokenizer(made).encode(text) == load_tokenizer(directory).encode(text)
    assert load_tokenizer(made).decode(load_tokenizer(made).encode(text)) == text
    assert json.loads((made / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    (source / "tokenizer_config.json").unlink()  # which names the end of a text, too
    assert load_tokenizer(source).eos_token_id == load_tokenizer(directory).eos_token_id


def test_a_space_that_a_tokenizers_settings_put_before_a_text_stays(directory: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(directory, tmp_path / "source"))
    vocabulary = {token: number for number, token in enumerate(["</s>", *"Ġabc"])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.save(str(source / "tokenizer.json"))
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "eos_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(source).encode("a b") == [1, 2, 1, 3]
    made = materialise_model(ModelConfig(source=str(source), max_length=128), 0, tmp_path / "policy")
    assert load_tokenizer(made).encode("a b") == [1, 2, 1, 3]


def test_an_end_that_the_tokenizer_does_not_know_is_refused_in_one_line(directory: Path, tmp_path: Path) -> None:
    source = broken(directory, tmp_path / "source", remove="tokenizer_config.json", eos_token_id=5000).source
    with pytest.raises(ConfigError, match=r"has eos_token_id = 5000, which its tokenizer does not know: allowed are 0"):
        load_tokenizer(Path(source))


def broken(directory: Path, target: Path, remove: str = "", **changes: Any) -> ModelConfig:
    target.mkdir()
    for file in directory.iterdir():
        if file.name != remove:
            (target / file.name).write_bytes(file.read_bytes())
    if changes:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, **changes}))
    return ModelConfig(source=str(target), max_length=128)


@pytest.mark.parametrize(
    ("remove", "changes", "message"),
    [
        ("config.json", {}, "has no config.json"),
        ("model.safetensors", {}, "lacks model.safetensors"),
        ("tokenizer.json", {}, "has no tokenizer"),
        (
            "",
            {"architectures": ["GPT2LMHeadModel"]},
            "unsupported architecture: GPT2LMHeadModel; supported: Llama",
        ),
        ("", {"architectures": None}, "supported: LlamaForCausalLM"),
        ("", {"max_position_embeddings": 64}, "the 64 positions of the model"),
    ],
)
def test_an_incomplete_directory_is_one_line_that_names_it(
    directory: Path, tmp_path: Path, remove: str, changes: dict[str, Any], message: str
) -> None:
    config = broken(directory, tmp_path / "source", remove, **changes)
    for attempt in (lambda: check_source(config), lambda: materialise_model(config, 0, tmp_path / "out")):
        with pytest.raises(ConfigError, match=message) as error:
            attempt()
        assert str(tmp_path / "source") in str(error.value)
        assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_missing_shard_is_named(directory: Path, tmp_path: Path) -> None:
    config = broken(directory, tmp_path / "source", remove="model.safetensors")
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps(shards))
    (tmp_path / "source" / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00002\.safetensors"):
        check_source(config)


@pytest.mark.parametrize("source", ["no-such-model", "/no/such/directory", "./missing"])
def test_an_unknown_source_is_one_clear_line(source: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.source|does not exist"):
        materialise_model(ModelConfig(source=source), 0, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_hub_model_without_a_network_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = ModelConfig(source="no-such-owner/no-such-model")
    with pytest.raises(ConfigError, match="the hub cannot be reached") as error:
        materialise_model(config, 0, tmp_path / "out")
    assert "\n" not in str(error.value)


def test_the_packaged_smollm2_is_a_tied_llama_with_single_digit_tokens(tmp_path: Path) -> None:
    made = materialise_model(ModelConfig(source="smollm2-135m"), 0, tmp_path / "smollm2")
    weights = load_file(made / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008
    assert "lm_head.weight" not in weights
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    tokenizer = load_tokenizer(made)
    text = "Q: 12 + 345\nA:"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("345")) == 3
    assert tokenizer.eos_token == "<|im_end|>"
