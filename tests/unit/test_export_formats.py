"""The formats that a drafter is exported in, against what loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flows.commands import export as export_command
from specrl.artifacts import (
    Acceptance,
    ExportResult,
    SpeedPair,
    TrainResult,
    ValidateResult,
    write_result,
)
from specrl.config import Config, ConfigError, DrafterConfig, dump_config
from specrl.export.card import ExportedDrafter, serve_arguments
from specrl.export.formats import FORMATS, sglang_config
from specrl.models.drafters import NORM_FLAGS
from specrl.training.drafter.io import read_drafter
from specrl.training.drafter.trainer import Drafter
from tests.unit.test_drafter import ALONE, DRAFT_VOCAB, HIDDEN, VOCAB, write_policy
from tests.unit.test_published_drafters import OFFSETS, YARN, original, tensors, with_yarn, write

LAYERS = [2, 4, 5]
MLP, QUERIES, KEYS = 40, 64, 16
"""The sizes of the drafter that `tensors` makes."""


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_yarn(write_policy(tmp_path_factory.mktemp("policy")))


def make(policy_dir: Path, folder: Path, *flags: str, layers: list[int] | None = None) -> tuple[Drafter, Path]:
    """A drafter with some norms and the policy's YaRN, trained no further and saved."""
    layers, on = layers or LAYERS, dict.fromkeys(flags, True)
    config = original(on, rope_theta=500.0, eagle_aux_hidden_state_layer_ids=layers)
    source = write(folder / "source", config, {**tensors(on, len(layers)), "d2t": OFFSETS})
    drafter = Drafter.load(source, policy_dir, DrafterConfig(), ALONE)
    drafter.save(folder / "drafter", policy_version=3)
    return drafter, folder / "drafter"


@pytest.mark.parametrize("form", ["eagle3", "speculators"])
def test_a_windowed_drafter_is_served_without_groups_of_layers(policy_dir: Path, tmp_path: Path, form: str) -> None:
    directory = make(policy_dir, tmp_path)[1]
    drafter, option = ExportedDrafter(directory, policy_dir, "someone/policy", 3), "--disable-hybrid-kv-cache-manager"
    FORMATS[form].write(drafter, tmp_path / "plain")
    assert option not in FORMATS[form].command(drafter, tmp_path / "plain")
    config = json.loads((directory / "config.json").read_text())
    window = {"sliding_window": 16, "layer_types": ["sliding_attention"]}
    (directory / "config.json").write_text(json.dumps(config | window))
    FORMATS[form].write(drafter, tmp_path / "windowed")
    assert option in FORMATS[form].command(drafter, tmp_path / "windowed").split()
    assert option in serve_arguments("someone/policy", Path("not yet"), 3, files=directory)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("flags", [(), ("fc_norm", "norm_output"), ("norm_before_fc",)], ids="+".join)
def test_a_format_gives_back_the_same_drafter(
    policy_dir: Path, tmp_path: Path, form: str, flags: tuple[str, ...]
) -> None:
    drafter, directory = make(policy_dir, tmp_path, *flags)
    FORMATS[form].write(ExportedDrafter(directory, policy_dir, "someone/policy", 3), tmp_path / form)
    again = Drafter.load(tmp_path / form, policy_dir, DrafterConfig(), ALONE)
    assert again.shape == drafter.shape
    assert again.shape.rope == YARN
    notes = read_drafter(tmp_path / form, policy_dir, torch.float32).notes
    assert ("its embeddings are the policy's" in notes) == (form == "speculators")
    assert torch.equal(again.draft_tokens, drafter.draft_tokens)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), drafter.model.parameters(), strict=True))


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_gives_back_two_layers(policy_dir: Path, tmp_path: Path, form: str) -> None:
    config = DrafterConfig(num_layers=2, feature_layers=(1, 3, 5), draft_vocab_size=VOCAB, sliding_window=16)
    drafter = Drafter.create(policy_dir, config, torch.arange(VOCAB), ALONE)
    drafter.save(tmp_path / "drafter", policy_version=0)
    exported = ExportedDrafter(tmp_path / "drafter", policy_dir, "someone/policy", 3)
    FORMATS[form].write(exported, tmp_path / form)
    assert ("layers.1.hidden_norm.weight" in load_file(tmp_path / form / "model.safetensors")) == (form == "sglang")
    assert ("--speculative-draft-window-size 15" in FORMATS[form].command(exported, tmp_path)) == (form == "sglang")
    again = Drafter.load(tmp_path / form, policy_dir, config, ALONE)
    assert again.shape == drafter.shape
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), drafter.model.parameters(), strict=True))


@pytest.mark.parametrize("flags", [(), ("fc_norm", "norm_output"), ("norm_before_fc",)], ids="+".join)
def test_sglang_finds_each_of_its_parameters_once(policy_dir: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """As `LlamaForCausalLMEagle3` of SGLang 0.5.23 loads: it drops, without a word, what it has no place for."""
    drafter, directory = make(policy_dir, tmp_path, *flags)
    FORMATS["sglang"].write(ExportedDrafter(directory, policy_dir, "someone/policy", 3), tmp_path / "sglang")
    config = json.loads((tmp_path / "sglang" / "config.json").read_text())
    expected, found = sglang_parameters(config), dict.fromkeys(sglang_parameters(config), 0)
    for name, tensor in load_file(tmp_path / "sglang" / "model.safetensors").items():
        if name in ("d2t", "t2d"):
            continue
        place, part = sglang_place(name)
        assert expected[place][part] == tuple(tensor.shape), name
        found[place] += 1
    assert found == {name: len(parts) for name, parts in expected.items()}
    hot = load_file(tmp_path / "sglang" / "model.safetensors")["d2t"] + torch.arange(DRAFT_VOCAB)
    assert torch.equal(hot, drafter.draft_tokens)
    assert [layer + 1 for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]] == LAYERS
    assert config["rope_scaling"]["rope_type"] == "yarn" and not config["tie_word_embeddings"]


def sglang_parameters(config: dict[str, Any]) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of the parts of each parameter of SGLang's drafter but the embeddings, which are the policy's."""
    count, norm = config["num_aux_hidden_states"], [(HIDDEN,)]
    found: dict[str, list[tuple[int, ...]]] = {
        "model.fc.weight": [(config["hidden_size"], config["target_hidden_size"] * count)],
        "model.layers.0.self_attn.qkv_proj.weight": [(QUERIES, 2 * HIDDEN), (KEYS, 2 * HIDDEN), (KEYS, 2 * HIDDEN)],
        "model.layers.0.self_attn.o_proj.weight": [(HIDDEN, QUERIES)],
        "model.layers.0.mlp.gate_up_proj.weight": [(MLP, HIDDEN), (MLP, HIDDEN)],
        "model.layers.0.mlp.down_proj.weight": [(HIDDEN, MLP)],
        "model.norm.weight": norm,
        "lm_head.weight": [(config["draft_vocab_size"], HIDDEN)],
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        found[f"model.layers.0.{name}.weight"] = norm
    if config.get("norm_before_fc", False):
        found["model.input_norm.weight"] = [(HIDDEN * count,)]
    if config.get("fc_norm") or config.get("use_aux_norm", False):
        found |= {f"model.fc_norm.{number}.weight": norm for number in range(count)}
    return found


def sglang_place(name: str) -> tuple[str, int]:
    """The parameter that SGLang loads a tensor into, and which part of it the tensor is."""
    name = name.replace("midlayer", "layers.0")
    stacked = [("q_proj", "qkv_proj", 0), ("k_proj", "qkv_proj", 1), ("v_proj", "qkv_proj", 2)]
    for own, fused, part in [*stacked, ("gate_proj", "gate_up_proj", 0), ("up_proj", "gate_up_proj", 1)]:
        if f".{own}." in name:
            return f"model.{name.replace(own, fused)}", part
    return name if name.startswith("lm_head") else f"model.{name}", 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"norm_before_residual": True}, "norm_before_residual = true"),
        ({"eagle_aux_hidden_state_layer_ids": [3]}, "a single feature layer"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3]}, "the embeddings as a feature"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 6]}, "the output of the policy's last layer"),
    ],
)
def test_what_sglang_would_compute_otherwise_is_refused(change: dict[str, Any], reason: str) -> None:
    eagle3 = {"eagle_aux_hidden_state_layer_ids": LAYERS, **dict.fromkeys(NORM_FLAGS, False)}
    sglang_config(eagle3, 6)
    with pytest.raises(ValueError, match=f"SGLang computes no drafter with {reason}"):
        sglang_config(eagle3 | change, 6)


@pytest.fixture
def run_dir(policy_dir: Path, tmp_path: Path) -> Path:
    """The folder of a run that has finished, as far as `specrl export` reads it."""
    _, directory = make(policy_dir, tmp_path, "fc_norm")
    run = tmp_path / "runs" / "run"
    precise: dict[str, Any] = {"step_seconds_median": 1.0, "timing_share": {}, "reward_first": 0.0, "reward_last": 1.0}
    checks: dict[str, Any] = {"refit_checks": 1, "refit_failures": 0, "refit_max_abs_logprob_diff": 0.0, "seconds": 1.0}
    measured: dict[str, Any] = {"set": "held-out", "temperature": 0.0, "num_drafts": 2}
    results = {
        "train": TrainResult(
            policy_dir=policy_dir,
            drafter_dir=directory,
            policy_step=3,
            steps=3,
            acceptance_length=2.1,
            acceptance_rate_per_pos=[0.7, 0.4],
            mismatch={},
            **precise,
            **checks,
        ),
        "validate": ValidateResult(
            accuracy_before=0.0,
            accuracy_after=1.0,
            num_prompts=4,
            acceptance_length=2.2,
            acceptance_rate_per_pos=[0.75, 0.5],
            speed=[
                SpeedPair(
                    batch=4,
                    plain_tokens_per_s=1.0,
                    speculative_tokens_per_s=2.0,
                    speedup=2.0,
                    speedup_min=1.5,
                    speedup_max=2.5,
                    decode_step_reduction=0.5,
                    tokens_equal=1.0,
                )
            ],
            seconds=1.0,
        ),
        "export": ExportResult(
            policy_dir=policy_dir,
            drafter_dir=directory,
            vllm_acceptance_length=2.3,
            acceptance=[
                Acceptance(acceptance_length=2.3, acceptance_rate_per_pos=[0.8, 0.5], context=None, **measured),
                Acceptance(acceptance_length=2.5, acceptance_rate_per_pos=[1.0, 0.5], context=(16, 31), **measured),
            ],
            seconds=1.0,
        ),
    }
    for stage, result in results.items():
        write_result(run / "stages" / f"{stage}-0123456789ab", result)
    (run / "config.json").write_text(dump_config(Config.model_validate({"name": "run"})))
    return run


def test_the_command_writes_a_format_with_a_card(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "new" / "folder"
    export_command.export("run", "sglang", to, "someone/policy", run_dir.parent)
    card, shown = (to / "README.md").read_text(), capsys.readouterr().out
    assert "| worked_sums, held out | 3 | 1 | 2.20 (by position 0.75 / 0.50) |" in card
    assert "| held-out | 0 | all | 2.30 (by position 0.80 / 0.50) |" in card
    assert "| worked_sums, the RL steps | chosen at each step | 1 | 2.10 |" in card
    assert "| held-out | 0 | 16 to 31 | 2.50 (by position 1.00 / 0.50) |" in card
    assert "| 4 | 2.00 | 1.50 - 2.50 |" in card
    command = "python -m sglang.launch_server --model-path someone/policy --speculative-algorithm EAGLE3"
    assert command in card and command in shown and str(to) in shown
    assert "Trained together with its policy (`smollm2-135m`, version" in card
    teacher = {"name": "run", "train": {"teacher": "large/model"}}
    (run_dir / "config.json").write_text(dump_config(Config.model_validate(teacher)))
    for form in ("eagle3", "speculators"):
        export_command.export("run", form, tmp_path / form, None, run_dir.parent)
        assert (tmp_path / form / "config.json").is_file() and "vllm serve" in (
            tmp_path / form / "README.md"
        ).read_text()
    assert "policy (`smollm2-135m` with the teacher `large/model`, v" in (tmp_path / "eagle3/README.md").read_text()
    with pytest.raises(ConfigError, match=f"--to {to}: it exists and is not an empty folder"):
        export_command.export("run", "sglang", to, None, run_dir.parent)
    with pytest.raises(ConfigError, match="--format gguf: allowed are eagle3, speculators, sglang, and policy"):
        export_command.export("run", "gguf", tmp_path / "other", None, run_dir.parent)


def test_a_run_without_a_drafter_of_its_own_or_unfinished_is_one_line(run_dir: Path, tmp_path: Path) -> None:
    path = next(run_dir.glob("stages/export-*/result.json"))
    result = ExportResult.model_validate_json(path.read_text())
    for changed, message in (
        ({"drafter_dir": None, "vllm_acceptance_length": None}, "run run has no drafter"),
        ({"drafter_dir": result.policy_dir}, "run run drafts with a layer of its policy"),
    ):
        write_result(path.parent, result.model_copy(update=changed))
        with pytest.raises(ConfigError, match=message):
            export_command.export("run", "eagle3", tmp_path / "to", None, run_dir.parent)
    path.unlink()
    with pytest.raises(ConfigError, match="run run has not finished export; continue it with: specrl resume"):
        export_command.export("run", "eagle3", tmp_path / "to", None, run_dir.parent)
