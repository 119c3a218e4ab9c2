"""Folders as downloads, merges, converters and other trainers leave them: each is one line that says how to mend it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from flows.preflight import check_model
from specrl.config import Config, ConfigError, ModelConfig, PolicyConfig
from specrl.distributed import join, leave
from specrl.models.checks.config import rope_of
from specrl.models.checks.folder import check_model_folder
from specrl.models.checks.headers import read_headers, tensor_shapes
from specrl.models.directory import HEAD, chat_template, read_model_config
from specrl.models.families import FAMILIES
from specrl.models.shapes import model_shape
from specrl.models.sources import materialise_model
from specrl.training.megatron.policy import Policy

# isort: split
from megatron.core import parallel_state

EMBEDDINGS, Q_PROJ = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
Change = Callable[[Path], object]


def tiny(family: str = "llama", *, tied: bool | None = None) -> ModelConfig:
    shape = {"family": family, "tie_embeddings": tied}
    return ModelConfig.model_validate({"source": "tiny", "dtype": "float32", "max_length": 64, "tiny": shape})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialise_model(tiny(), 7, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        check_model_folder(folder, 64)
    line = str(error.value)
    assert "\n" not in line and str(folder) in line
    return line


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        found = read_model_config(folder) | changes
        (folder / "config.json").write_text(json.dumps({key: value for key, value in found.items() if value != "-"}))

    return change


def tensors(**changes: torch.Tensor | None) -> Change:
    """Change tensors, whose names have `__` in place of dots; None leaves one out."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        found = load_file(path) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path)

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def renamed(name: str, *also: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / name)
        for other in also:
            (folder / other).write_text("{}")

    return change


def cut(size: int) -> Change:
    return lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:size])


def retyped(name: str, dtype: str) -> Change:
    """Write another type in the header of the weights, and leave the bytes of the tensor as they are."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        header[name]["dtype"] = dtype
        changed = json.dumps(header).encode()
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[begin:])

    return change


def with_sentencepiece(content: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_text(content)

    return change


def tokenizer_config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
INDEX = "model.safetensors.index.json"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (config(max_position_embeddings=None), "max_position_embeddings = null: it must be a whole number"),
        (config(num_attention_heads="-"), "num_attention_heads = null"),
        (config(hidden_size="128"), 'hidden_size = "128"'),
        (config(num_key_value_heads=3), "num_key_value_heads = 3 must divide num_attention_heads = 4"),
        (config(architectures="LlamaForCausalLM"), "unsupported architecture: none given; supported: Llama"),
        (config(model_type="mistral"), 'model_type = "mistral" is not supported in a LlamaForCausalLM: it must be'),
        (config(quantization_config=FP8), 'quantization_config with quant_method = "fp8" is not supported'),
        (config(attention_bias=True), "use a checkpoint with attention_bias = false"),
        (config(mlp_bias=True), "use a checkpoint with mlp_bias = false"),
        (config(hidden_act="gelu"), 'hidden_act = "gelu"'),
        (config(sliding_window=4096), "sliding_window = 4096 is not supported"),
        (config(layer_types=["full_attention", "sliding_attention"]), 'layer_types = "sliding_attention" in 1 of 2'),
        (config(rope_scaling={"type": "dynamic", "factor": 2.0}), 'rope_scaling with rope_type = "dynamic": supported'),
        (config(rope_scaling="yarn"), 'rope_scaling = "yarn": it must be an object'),
        (
            config(rope_scaling={**YARN, "factor": "4"}),
            'rope_type = "yarn" has factor = "4": it must be a number above 0',
        ),
        (config(rope_scaling={"type": "linear"}), 'rope_type = "linear" has factor = null'),
        (
            config(rope_scaling={"type": "linear", "factor": float("nan")}),
            "has factor = NaN: it must be a number above 0",
        ),
        (config(rope_scaling={"type": "linear", "factor": float("inf")}), "has factor = Infinity: it must be a number"),
        (config(rope_parameters={"full_attention": {"rope_theta": 1e6}}), "has full_attention, which is not supported"),
        (config(rope_parameters="-", rope_theta=0), "rope_theta = 0: it must be a number above 0"),
        (config(num_key_value_heads="2"), 'num_key_value_heads = "2": it must be a whole number above 0'),
        (config(head_dim=-32), "head_dim = -32"),
        (config(tie_word_embeddings="true"), 'tie_word_embeddings = "true": it must be true or false'),
        (config(dtype="float12"), 'dtype = "float12": it must be one of float32'),
        (config(quantization_config="fp8"), 'quantization_config = "fp8": it must be an object'),
        (config(layer_types=["full_attention"]), "layer_types has 1 entries, and num_hidden_layers = "),
        (config(logit_scale=0.5), "use a checkpoint with logit_scale = 1.0"),
        (config(eos_token_id="2"), 'eos_token_id = "2": it must be the number of a token'),
        (config(eos_token_id=-1), "eos_token_id = -1: it must be"),
        (text("generation_config.json", '{"eos_token_id": [2, 4000]}'), "with eos_token_id = 4000 lies beyond"),
        (text("config.json", 100_000 * "["), "recursion"),
        (
            config(dual_chunk_attention_config={"chunk_size": 8}),
            "use a checkpoint with dual_chunk_attention_config = null",
        ),
        (config(is_causal=False), "is_causal = false"),
        (config(rms_norm_eps=None), "rms_norm_eps = null: it must be a number above 0"),
        (config(rms_norm_eps=float("inf")), "rms_norm_eps = Infinity: it must be a number above 0"),
        (config(attention_dropout="x"), 'attention_dropout = "x": it must be a number from 0 to 1'),
        (config(initializer_range=float("nan")), "initializer_range = NaN: it must be a decimal from 0.0 to 1.0"),
        (config(initializer_range=0), "initializer_range = 0: it must be a decimal from 0.0 to 1.0"),
        (config(hidden_act=None), 'hidden_act = null: it must be "silu"'),
        (config(attention_bias=0), "attention_bias = 0: it must be true or false"),
        (config(use_cache=None), "use_cache = null: it must be true or false"),
        (config(max_window_layers=1.5), "max_window_layers = 1.5: it must be a whole number from 0 on"),
        (config(auto_map=None), "auto_map = null: it must be an object"),
        (config(eos_token_id=[None]), "eos_token_id = [null]: it must be the number of a token"),
        (config(layer_types=[]), "layer_types has 0 entries, and num_hidden_layers = "),
        (
            config(rope_scaling={"type": "yarn", "factor": 4.0}, original_max_position_embeddings="32"),
            'original_max_position_embeddings = "32": it must be a whole number above 0',
        ),
        (config(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (config(eos_token_id=[2, 4000]), "eos_token_id = 4000 lies beyond the embeddings"),
        (
            config(vocab_size=256),
            "has model.embed_tokens.weight of shape [128, 128], and its config.json says [256, 128]",
        ),
        (config(num_hidden_layers=4), "num_hidden_layers = 4 is too small for it"),
        (config(num_hidden_layers=8), "lacks tensors of a LlamaForCausalLM of its config.json (model.layers.6."),
        (config(tie_word_embeddings=False), "where that is the embeddings' matrix, set true"),
        (text("config.json", "[]"), "no JSON object, but list"),
        (text("config.json", "\ufeff{}"), "BOM"),
        (text("config.json", LFS), "git lfs pull"),
        (lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xff"}'), "not JSON in UTF-8"),
        (text("generation_config.json", "{"), "has a generation_config.json that is not JSON"),
        (text(INDEX, '{"weight_map": {"a": "mod'), f"has a {INDEX} that is not JSON"),
        (text(INDEX, "{}"), "without weight_map"),
        (text(INDEX, '{"weight_map": {"a": "../model.safetensors"}}'), "without weight_map of files beside it"),
        (text(INDEX, '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'), f"remove {INDEX}"),
        (text(INDEX, '{"weight_map": {"a": "model.safetensors"}}'), f"lacks tensors where {INDEX} lists them (a)"),
        (renamed("model-00001-of-00001.safetensors"), "rename a single shard model.safetensors"),
        (renamed("pytorch_model.bin"), "from_pretrained(FOLDER).save_pretrained(NEW)"),
        (renamed("model.gguf"), "gguf_file"),
        (renamed("consolidated.safetensors"), "take the checkpoint for transformers"),
        (retyped("model.norm.weight", "F16"), "has model.norm.weight in 512 bytes, not those of its type and shape"),
        (renamed("adapter_model.safetensors", "adapter_config.json"), "merge_and_unload() of peft"),
        (text("adapter_config.json", "{}"), "merge_and_unload() of peft"),
        (text("model.safetensors", LFS), "git lfs pull"),
        (text("model.safetensors", "<!DOCTYPE html>" + 200 * "x"), "that is no safetensors file"),
        (text("model.safetensors", ""), "0 bytes"),
        (cut(1000), "no safetensors file, or its beginning"),
        (cut(-1), "its download is incomplete"),
        (lambda folder: shutil.copy(folder / "model.safetensors", folder / "other.safetensors"), "other.safetensors"),
        (text("tokenizer.json", "{"), "has a tokenizer.json that is not JSON"),
        (text("tokenizer.json", "{}"), "has a tokenizer.json that is no tokenizer"),
        (text("tokenizer.json", LFS), "git lfs pull"),
        (with_sentencepiece("none"), "has a tokenizer.model that is no tokenizer"),
        (with_sentencepiece(""), "has a tokenizer.model that is no tokenizer"),
        (tokenizer_config(auto_map={"AutoTokenizer": ["a.B", None]}, tokenizer_class="B"), "code of its own"),
        (tokenizer_config(auto_map=None), "remove auto_map from tokenizer_config.json"),
        (
            tokenizer_config(eos_token=["</s>", "<pad>"]),
            'a tokenizer_config.json with eos_token = ["</s>", "<pad>"]: it',
        ),
        (tokenizer_config(pad_token=0), "pad_token = 0: it must be a text or an object"),
        (text("special_tokens_map.json", '{"eos_token": 2}'), "special_tokens_map.json with eos_token = 2: it must be"),
        (tokenizer_config(added_tokens_decoder=[]), "added_tokens_decoder = []: it must be an object"),
        (tokenizer_config(added_tokens_decoder={"0": "<pad>"}), "an object for the number of each token"),
        (tokenizer_config(added_tokens_decoder={"a": {}}), "an object for the number of each token"),
        (tokenizer_config(extra_special_tokens=5), "extra_special_tokens = 5: it must be a list or an object"),
        (tokenizer_config(additional_special_tokens="</s>"), 'additional_special_tokens = "</s>": it must be a list'),
        (tokenizer_config(model_max_length="64"), 'model_max_length = "64": it must be a number above 0'),
        (tokenizer_config(padding_side="middle"), 'padding_side = "middle": it must be "left" or "right"'),
        (tensors(model__layers__0__self_attn__q_proj__bias=torch.zeros(128)), "the trainer has no such bias"),
        (tensors(model__norm__weight_scale=torch.ones(1)), "it is quantised"),
        (tensors(v_head__weight=torch.ones(1)), "reward or value model"),
        (tensors(base_model__model__x__lora_A__weight=torch.ones(1)), "merge_and_unload() of peft"),
        (tensors(model__norm__weight=None), "lacks tensors of a LlamaForCausalLM"),
        (tensors(model__norm__weight=torch.ones(128, dtype=torch.int8)), "has model.norm.weight in I8"),
        (tensors(lm_head__weight=torch.ones(128, 128)), "set tie_word_embeddings = false"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line_that_says_how_to_mend_it(
    folder: Path, change: Change, words: str
) -> None:
    change(folder)
    assert words in refusal(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter_config.json", "merge_and_unload() of peft"),
        ("model_world_size_8_rank_0.pt", "verl.model_merger merge"),
        ("global_step100", "zero_to_fp32.py"),
        ("snapshots", "give the folder within snapshots"),
        ("model.gguf", "gguf_file"),
        ("model.safetensors", "download the folder again"),
    ],
)
def test_a_folder_without_a_configuration_says_what_it_is_instead(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    line = refusal(tmp_path)
    assert "has no config.json: " in line and words in line


def test_tokens_beyond_the_embeddings_are_named(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {"id": 128, "content": "<new>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    )
    tokenizer["model"]["vocab"] |= {f"t{number}": number for number in range(len(tokenizer["model"]["vocab"]), 128)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "token '<new>' = 128, beyond the embeddings' vocab_size = 128 rows" in refusal(folder)
    tokenizer["added_tokens"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_model_folder(folder, 64)
    tokenizer_config(pad_token={"content": "[PAD]"})(folder)  # which transformers would add
    assert "token '[PAD]' = 128, beyond the embeddings" in refusal(folder)


def test_a_model_without_an_end_and_one_that_is_a_file_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is a file: give the folder that it lies in"):
        check_model_folder(folder / "model.safetensors", 64)
    config(eos_token_id=None)(folder)
    check_model_folder(folder, 64)
    tokenizer_config(eos_token=None)(folder)
    assert "names no token that ends a response" in refusal(folder)


def test_families_with_defaults_of_their_own_must_state_them(tmp_path: Path) -> None:
    for family in FAMILIES.values():
        folder = materialise_model(tiny(family.name), 0, tmp_path / family.name)
        found = read_model_config(folder)
        for key in family.stated:
            config(**found | {key: "-"})(folder)
            assert f"{key} = null: it must be" in refusal(folder)


def test_a_number_of_layers_that_is_none_is_said_of_any_family(tmp_path: Path) -> None:
    folder = materialise_model(tiny("mimo"), 0, tmp_path / "mimo")
    config(num_nextn_predict_layers=float("nan"))(folder)
    assert "num_nextn_predict_layers = NaN: it must be a whole number from 0 on" in refusal(folder)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 48}])
def test_the_original_length_beside_the_table_of_yarn_is_that_of_trainer_and_engine(
    key: str, inside: dict[str, Any], folder: Path
) -> None:
    from vllm.transformers_utils.config import get_config

    yarn = {"rope_type": "yarn", "factor": 4.0, **inside}
    config(**{"rope_parameters": "-", key: yarn}, original_max_position_embeddings=16)(folder)
    check_model_folder(folder, 64)
    trainers = rope_of(AutoConfig.from_pretrained(folder).to_dict())
    assert trainers["original_max_position_embeddings"] == 16
    assert trainers == get_config(str(folder), trust_remote_code=False).rope_parameters


@pytest.mark.parametrize("rope", [YARN, {"type": "linear", "factor": 2.0}])
def test_scaled_rotary_embeddings_are_taken(rope: dict[str, Any], folder: Path) -> None:
    config(rope_scaling=rope)(folder)
    check_model_folder(folder, 64)


def test_a_vocabulary_without_merges_and_a_lost_link_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    assert "vocab.json without merges.txt" in refusal(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/gone")
    assert "links to files that are not there" in refusal(folder)


def test_a_head_that_equals_tied_embeddings_and_what_is_derived_are_no_obstacles(folder: Path) -> None:
    embeddings = load_file(folder / "model.safetensors")[EMBEDDINGS]
    tensors(lm_head__weight=embeddings.clone(), model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16))(
        folder
    )
    check_model_folder(folder, 64)


def test_the_trainer_loads_no_head_of_its_own_beside_tied_embeddings(folder: Path) -> None:
    tensors(lm_head__weight=torch.ones(128, 128))(folder)
    try:
        with pytest.raises(ConfigError, match="set tie_word_embeddings = false"):
            Policy(folder, PolicyConfig(), dtype="float32", ranks=join(), seed=0, trainable=False)
    finally:
        parallel_state.destroy_model_parallel()
        leave()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_expected_tensors_are_those_that_the_model_of_each_family_has(family: str, tmp_path: Path) -> None:
    for tied in (False, True) if FAMILIES[family].can_tie else (False,):
        made = materialise_model(tiny(family, tied=tied), 0, tmp_path / str(tied))
        found = {name: tensor.shape for name, tensor in read_headers(made).items()}
        assert tensor_shapes(read_model_config(made)) == found
        assert (HEAD in found) != tied


def test_a_dry_run_says_that_a_chat_template_is_missing(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    values = {"name": "x", "model": {"source": str(folder), "dtype": "float32", "max_length": 64}}
    values |= {"data": {"template": "chat"}, "sampling": {"max_response_tokens": 32}}
    values |= {"speculation": {"method": "none", "k": 0}}
    [line] = check_model(Config.model_validate(values))
    assert "has no chat template; put one there as chat_template.jinja" in line
    (folder / "chat_template.jinja").write_text("")
    assert check_model(Config.model_validate(values)) == [line]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content | shout }}")
    assert "No filter named 'shout'" in check_model(Config.model_validate(values))[0]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert check_model(Config.model_validate(values)) == []
    (folder / "chat_template.jinja").write_text("{%- generation %}{{ messages[0].content }}{% endgeneration -%}")
    assert check_model(Config.model_validate(values)) == []
    values["data"]["chat_template_kwargs"] = {"enable_thinking": False}
    assert "chat_template_kwargs.enable_thinking" in check_model(Config.model_validate(values))[0]
    (folder / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message.content }")
    assert "the tokenizer's chat template is wrong in line 2" in check_model(Config.model_validate(values))[0]


def test_a_file_of_chat_templates_that_cannot_be_read_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ConfigError, match=rf"^model directory {tmp_path} has a chat_template.json that is not JSON"):
        chat_template(tmp_path)


def test_what_can_be_no_source_is_not_taken_for_a_name_of_the_hub() -> None:
    for source in ("qwen", "https://huggingface.co/Qwen/Qwen3-8B", "a/b/c"):
        with pytest.raises(ConfigError, match="allowed are smollm2-135m, tiny, an existing directory, or a hub id"):
            model_shape(ModelConfig(source=source))


def test_any_number_of_tokens_may_end_a_response(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(2, 20))}))
    check_model_folder(folder, 64)
