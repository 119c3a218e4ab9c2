"""Drafters in the layouts that others publish: what is read, what is decided, and that the same is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from specrl.artifacts import PrepareResult, read_result
from specrl.config import ConfigError, DrafterConfig, dump_config, parse_config
from specrl.context import StageContext
from specrl.events import read_events
from specrl.keys import run_keys
from specrl.models.checks.config import rope_of
from specrl.models.drafters import NORM_FLAGS, check_source_drafter, with_source_sizes
from specrl.models.families import TINY_VOCAB_SIZE
from specrl.models.shapes import model_shape
from specrl.projection.memory import Rank, kv_bytes_per_token
from specrl.projection.plan import plan
from specrl.stages import prepare
from specrl.training.drafter.drafters import new_drafter
from specrl.training.drafter.io import read_drafter
from specrl.training.drafter.trainer import Drafter
from tests.literal_drafting import LiteralDrafter
from tests.unit.test_drafter import ALONE, DRAFT_VOCAB, HIDDEN, VOCAB, enlarge, make_features, unroll, write_policy
from tests.unit.test_prepare import SETTINGS

LAYERS = [1, 4]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


def tensors(flags: dict[str, bool], layers: int = 3) -> dict[str, Tensor]:
    """The parameters of a drafter of other sizes than the policy's, by the names of the original layout."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "fc.weight": (HIDDEN, layers * HIDDEN),
        **{f"midlayer.self_attn.{name}_proj.weight": (16, 2 * HIDDEN) for name in "kv"},
        "midlayer.self_attn.q_proj.weight": (64, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, 64),
        **{f"midlayer.mlp.{name}_proj.weight": (40, HIDDEN) for name in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": (HIDDEN, 40),
        **{
            f"midlayer.{name}.weight": (HIDDEN,)
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    }
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (layers * HIDDEN,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{number}.weight": (HIDDEN,) for number in range(layers)}
    found = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor + (tensor.dim() == 1) for name, tensor in found.items()}


VOCABULARY = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB].sort().values
MASK = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, VOCABULARY, True)
OFFSETS = VOCABULARY - torch.arange(DRAFT_VOCAB)
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}


def write(directory: Path, config: dict[str, Any], found: dict[str, Tensor], *, pickled: bool = False) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(found, directory / "pytorch_model.bin")
    else:
        save_file(found, directory / "model.safetensors")
    return directory


def original(flags: dict[str, bool], **more: Any) -> dict[str, Any]:
    """A `config.json` of the original layout, with little written out."""
    return {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB, **LAYER, **flags, **more}


def speculators(flags: dict[str, bool], **more: Any) -> dict[str, Any]:
    """A `config.json` as version 0.9 of the library writes it."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "embed_requires_grad": False,
        **{flag: flags.get(flag, False) for flag in NORM_FLAGS},
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "someone/policy"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": {**LAYER, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        **more,
    }


@pytest.mark.parametrize("flags", [(), *((flag,) for flag in NORM_FLAGS), NORM_FLAGS], ids="+".join)
def test_every_layout_computes_the_same(policy_dir: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Six writers of one drafter: names, `d2t`, `t2d`, embeddings and places of settings differ."""
    on = dict.fromkeys(flags, True)
    own, embeddings = tensors(on, len(LAYERS)), {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    layered = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in own.items()}
    mappings, ids = {"d2t": OFFSETS, "t2d": MASK}, {"d2t": VOCABULARY, "t2d": MASK}
    layers = {"eagle_aux_hidden_state_layer_ids": LAYERS, "rope_theta": 500.0}
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3], "use_aux_hidden_state": True}}
    shuffled = torch.randperm(DRAFT_VOCAB, generator=torch.Generator().manual_seed(1))
    mixed = own | {"lm_head.weight": own["lm_head.weight"][shuffled], "d2t": VOCABULARY[shuffled], "t2d": MASK}
    written = [
        write(tmp_path / "original", original(on, **layers), {**own, **mappings}),
        write(tmp_path / "pickled", original(on, **layers), {**own, **mappings, **embeddings}, pickled=True),
        write(tmp_path / "ids", original(on, **layers), {**own, **ids}),
        write(tmp_path / "unsorted", original(on, **layers), mixed),
        write(tmp_path / "sglang", original(on, rope_theta=500.0, **nested), {**layered, "d2t": OFFSETS}),
        write(tmp_path / "speculators", speculators(on), {**layered, **mappings, **embeddings}),
    ]
    drafters = [Drafter.load(directory, policy_dir, DrafterConfig(ttt_steps=3), ALONE) for directory in written]
    first = drafters[0]
    assert first.shape.feature_layers == tuple(LAYERS) and first.feature_layers == (*LAYERS, 6)
    assert (first.shape.max_position_embeddings, first.shape.intermediate_size) == (256, 40)
    assert [getattr(first.shape, flag) for flag in NORM_FLAGS] == [flag in flags for flag in NORM_FLAGS]
    for other in drafters[1:]:
        assert other.shape == first.shape and torch.equal(other.draft_tokens, VOCABULARY)
        assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.parametrize("flags", [*((flag,) for flag in NORM_FLAGS), NORM_FLAGS], ids="+".join)
def test_norms_and_yarn_train_as_they_draft_and_survive_saving(tmp_path: Path, flags: tuple[str, ...]) -> None:
    policy_dir = with_yarn(write_policy(tmp_path / "policy"))
    on = dict.fromkeys(flags, True)
    config = original(on, rope_theta=500.0, eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    source = write(tmp_path / "drafter", config, {**tensors(on), "d2t": OFFSETS, "t2d": MASK})
    drafter = Drafter.load(source, policy_dir, DrafterConfig(ttt_steps=3), ALONE)
    assert drafter.shape.rope == YARN
    enlarge(drafter)
    features = make_features(drafter, [(3, 9), (70, 4)])
    logits = unroll(drafter, features)
    literal = LiteralDrafter(drafter.model, drafter.model.embeddings)  # type: ignore[arg-type]
    expected: list[list[Tensor]] = [[], [], []]
    for row, (prompt, response) in enumerate([(3, 9), (70, 4)]):
        for start in range(prompt - 1, prompt + response - 2):
            steps = min(3, prompt + response - 2 - start)
            chain = literal.forced(features.tokens[row].tolist(), features.hidden[row], start, steps)
            for step, step_logits in enumerate(chain):
                expected[step].append(step_logits)
    for actual, wanted in zip(logits, expected, strict=True):
        assert torch.allclose(actual.double(), torch.stack(wanted), atol=2e-4)
    losses = [drafter.update([features], lr=3e-3)["loss"] for _ in range(12)]
    assert losses[-1] < losses[0]
    drafter.save(tmp_path / "saved", policy_version=1)
    again = Drafter.load(tmp_path / "saved", policy_dir, DrafterConfig(ttt_steps=3), ALONE)
    assert again.shape == drafter.shape
    assert all(torch.equal(a, b) for a, b in zip(drafter.model.parameters(), again.model.parameters(), strict=True))


def with_yarn(policy_dir: Path) -> Path:
    config = json.loads((policy_dir / "config.json").read_text())
    rope = {"rope_parameters": YARN, "rope_theta": 500.0, "max_position_embeddings": 256}
    (policy_dir / "config.json").write_text(json.dumps(config | rope))
    return policy_dir


@pytest.mark.parametrize(
    ("d2t", "t2d", "how"),
    [
        (OFFSETS, MASK, "offsets"),
        (VOCABULARY, MASK, "token ids"),
        (OFFSETS, None, "offsets"),  # neighbouring tokens have equal offsets
        (VOCABULARY, None, "token ids"),  # as offsets they would lead out of the vocabulary
        (torch.zeros(DRAFT_VOCAB, dtype=torch.int64), None, "offsets"),
        (2 * torch.arange(DRAFT_VOCAB) % 16 + torch.arange(DRAFT_VOCAB) // 8, None, None),
    ],
)
def test_d2t_is_recognised_by_what_it_holds(
    policy_dir: Path, tmp_path: Path, d2t: Tensor, t2d: Tensor | None, how: str | None
) -> None:
    mappings = {"d2t": d2t} if t2d is None else {"d2t": d2t, "t2d": t2d}
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    source = write(tmp_path / "drafter", original({}, **layers), {**tensors({}), **mappings})
    if how is None:
        with pytest.raises(ValueError, match="d2t, read as offsets or token ids, is not a vocabulary"):
            read_drafter(source, policy_dir)
    else:
        assert f"its d2t holds {how}, of {DRAFT_VOCAB} tokens" in read_drafter(source, policy_dir).notes


def test_a_d2t_that_may_be_either_is_not_guessed(policy_dir: Path, tmp_path: Path) -> None:
    config = original({}, draft_vocab_size=4, eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    found = tensors({}) | {"lm_head.weight": torch.zeros(4, HIDDEN), "d2t": torch.tensor([0, 3, 8, 20])}
    with pytest.raises(ValueError, match=r"can be read as offsets and as token ids, and there is no t2d"):
        read_drafter(write(tmp_path / "drafter", config, found), policy_dir)


def test_rotary_embeddings_of_all_versions_of_transformers_are_one_form() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert rope_of({"rope_theta": 500.0, "rope_scaling": scaling}) == rope_of({"rope_parameters": YARN}) == YARN
    assert rope_of({}) == {"rope_type": "default", "rope_theta": 10000.0}
    assert rope_of(LlamaConfig(rope_theta=5.0).to_dict()) == {"rope_type": "default", "rope_theta": 5.0}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a drafter for the tiny policy of `SETTINGS`, and the folder's place as the present one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    policy = parse_config({"name": "x", **SETTINGS}).model.tiny
    size = {"hidden_size": policy.hidden_size, "intermediate_size": 40, "vocab_size": TINY_VOCAB_SIZE}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "model_type": "llama"}
    (tmp_path / "drafter").mkdir()
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 16, **size, **heads, **layers}
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    return tmp_path


def context(folder: Path, **drafter: Any) -> StageContext:
    sections = {"drafter": {**SETTINGS["drafter"], "source": str(folder / "drafter"), **drafter}}
    config = parse_config({"name": "test", "runs_dir": str(folder), **SETTINGS, **sections})
    return StageContext(config, "prepare", "prepare-0", folder / "prepare-0", inputs={}, mlflow_run_id="")


def test_prepare_takes_a_published_drafter_and_says_what_it_found(tiny: Path) -> None:
    hidden = parse_config({"name": "x", **SETTINGS}).model.tiny.hidden_size
    shape = {name: list(tensor.shape) for name, tensor in tensors({}).items()}
    resize = {HIDDEN: hidden, 2 * HIDDEN: 2 * hidden, 3 * HIDDEN: 3 * hidden, DRAFT_VOCAB: 16}
    kv = {f"midlayer.self_attn.{name}_proj.weight": [hidden // 2, 2 * hidden] for name in "kv"}
    attention = {"q": [hidden, 2 * hidden], "o": [hidden, hidden]}
    wanted = {name: [resize.get(size, size) for size in sizes] for name, sizes in shape.items()} | kv
    wanted |= {f"midlayer.self_attn.{name}_proj.weight": sizes for name, sizes in attention.items()}
    found = {name: torch.ones(sizes) for name, sizes in wanted.items()}
    offsets, mask = 7 + torch.arange(16), torch.zeros(TINY_VOCAB_SIZE, dtype=torch.bool)
    mask[offsets + torch.arange(16)] = True
    save_file(found | {"d2t": offsets, "t2d": mask}, tiny / "drafter" / "model.safetensors")
    stage = context(tiny, epochs=0)
    prepare.main(stage)
    result = read_result(stage.stage_dir, PrepareResult)
    assert result.drafter_dir is not None
    texts = [event.text for event in read_events(stage.stage_dir) if event.kind == "drafter"]
    assert texts[0] == f"{tiny / 'drafter'}: an EAGLE-3 drafter in the original layout"
    assert texts[-1] == "its d2t holds offsets, of 16 tokens"
    drafter = new_drafter(stage.config, result.policy_dir, [], ALONE, result.drafter_dir)
    assert drafter.draft_tokens.tolist() == [7 + 2 * token for token in range(16)]
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in drafter.model.parameters())


def test_a_source_counts_in_the_keys_by_its_files_and_only_where_it_drafts(tiny: Path) -> None:
    config = context(tiny).config
    before = run_keys(config, "code")
    plain = parse_config({"name": "test", **SETTINGS})
    assert all(before[stage] != key for stage, key in run_keys(plain, "code").items())
    (tiny / "drafter").rename(tiny / "moved")
    moved = parse_config(
        {"name": "test", **SETTINGS, "drafter": {**SETTINGS["drafter"], "source": str(tiny / "moved")}}
    )
    assert run_keys(moved, "code") == before
    (tiny / "moved" / "model.safetensors").write_text("other")
    assert all(before[stage] != key for stage, key in run_keys(moved, "code").items())
    ngram = {"speculation": {"method": "ngram"}}
    sections = [
        parse_config({"name": "x", **SETTINGS, **ngram, "drafter": {"source": source}}) for source in (None, "a/b")
    ]
    first, second = (run_keys(found, "code") for found in sections)
    assert first == second


@pytest.mark.parametrize(
    ("drafter", "method", "message"),
    [
        ({"epochs": 0}, "eagle3", "drafter.epochs = 0: a new drafter must be trained"),
        ({"source": "a/b"}, "mtp", 'drafter.source = "a/b" with speculation.method = "mtp"'),
    ],
)
def test_settings_that_do_not_fit_together(drafter: dict[str, Any], method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"name": "x", "drafter": drafter, "speculation": {"method": method}})


def test_the_memory_plan_counts_a_source_by_its_own_sizes(tiny: Path) -> None:
    found = with_source_sizes(context(tiny).config).drafter
    assert (found.draft_vocab_size, found.intermediate_size, found.feature_layers) == (16, 40, (2, 3, 4))
    plain = parse_config({"name": "x", **SETTINGS})
    assert with_source_sizes(plain) == plain


def test_the_plan_counts_and_checks_the_heads_of_a_source(tiny: Path) -> None:
    path = tiny / "drafter" / "config.json"
    found = json.loads(path.read_text())
    more = {"resources": {"ranks_per_node": 4}, "engine": {"tensor_parallel": 4}}
    config = parse_config(json.loads(dump_config(context(tiny).config)) | more)
    shape = model_shape(config.model)

    def planned(**heads: int) -> tuple[int, float]:
        path.write_text(json.dumps(found | heads))
        rank = Rank(shape, config, gpu=0, data_parallel=1)
        return rank.drafter_parameters, kv_bytes_per_token(rank)

    as_policy, wider = planned(), planned(head_dim=2 * shape.head_dim)
    assert wider[0] - as_policy[0] == shape.hidden_size * (4 * shape.kv_size + 3 * shape.query_size)
    assert wider[1] > as_policy[1]
    planned(num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel = 4 does not divide the 2 attention and 1 KV heads"):
        plan(config)


def test_a_source_is_checked_before_the_run(tiny: Path) -> None:
    check_source_drafter(context(tiny).config, None)
    missing = parse_config({"name": "x", "drafter": {"source": "./nowhere"}})
    with pytest.raises(ConfigError, match=r"drafter\.source: no drafter in nowhere: config.json is missing"):
        check_source_drafter(missing, None)
    with pytest.raises(ConfigError, match=r"drafter\.source = 'nowhere': allowed are an existing directory, or a hub"):
        check_source_drafter(parse_config({"name": "x", "drafter": {"source": "nowhere"}}), None)
    policy = write_policy(tiny / "policy")
    with pytest.raises(ConfigError, match=r"drafter\.source: drafter in .* has hidden_size = 128, and the policy has"):
        check_source_drafter(context(tiny).config, policy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": "x"}, 'rope_theta = "x": it must be a number above 0'),
        ({"rope_scaling": "yarn"}, 'rope_scaling = "yarn": it must be an object'),
        ({"rope_scaling": {"rope_type": "linear"}}, 'rope_type = "linear" has factor = null'),
        ({"max_position_embeddings": "64"}, 'max_position_embeddings = "64": it must be a whole number above 0'),
        ({"draft_vocab_size": float("nan")}, "draft_vocab_size = NaN: it must be a whole number from 0 on"),
        ({"num_attention_heads": 1.5}, "num_attention_heads = 1.5: it must be a whole number above 0"),
        ({"architectures": 1}, "architectures = 1: it must be a list"),
        ({"eagle_config": "x"}, 'eagle_config = "x": it must be an object'),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, "it must be a list of whole numbers"),
        ({"vocab_size": None}, "vocab_size = null: it must be a whole number above 0"),
    ],
)
def test_a_key_of_another_form_is_one_line_before_the_run(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = write(tmp_path / "drafter", original({}, **changes), {})
    with pytest.raises(ConfigError) as error:
        check_source_drafter(parse_config({"name": "x", "drafter": {"source": str(source)}}), None)
    assert words in str(error.value) and str(source / "config.json") in str(error.value)


def test_a_window_of_the_source_is_its_own(policy_dir: Path, tmp_path: Path) -> None:
    window = {"sliding_window": 16, "layer_types": ["sliding_attention"], "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    source = write(tmp_path / "drafter", original({}, **window), {**tensors({}), "d2t": OFFSETS})
    check_source_drafter(parse_config({"name": "x", "drafter": {"source": str(source)}}), policy_dir)


def test_two_norms_before_the_attention_of_a_layer_are_refused(policy_dir: Path, tmp_path: Path) -> None:
    drafter = Drafter.create(
        policy_dir, DrafterConfig(num_layers=2, draft_vocab_size=VOCAB), torch.arange(VOCAB), ALONE
    )
    drafter.save(tmp_path, policy_version=0)
    found = load_file(tmp_path / "model.safetensors")
    save_file(found | {"layers.1.hidden_norm.weight": torch.ones(HIDDEN)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has layers\.1\.hidden_norm\.weight, which a drafter with its config\.json"):
        read_drafter(tmp_path, policy_dir)


@pytest.mark.parametrize("place", ["config", "rope"])
def test_a_rotary_embedding_of_a_part_of_the_head_is_refused(policy_dir: Path, tmp_path: Path, place: str) -> None:
    partly = {"partial_rotary_factor": 0.5}
    more = partly if place == "config" else {"rope_parameters": {"rope_theta": 500.0, **partly}}
    source = write(tmp_path / "drafter", original({}, **more), {**tensors({}), "d2t": OFFSETS})
    with pytest.raises(ValueError, match=r"partial_rotary_factor = 0\.5: specrl computes drafters with 1\.0 only"):
        read_drafter(source, policy_dir)
