"""Every mistake in a configuration is one line that names the key, its value and what is allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specrl.config import STAGES, ConfigError, change_config, dump_config, load_config, parse_config
from specrl.config.algorithms import LOSSES
from specrl.lineage.revision import config_changes

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def write(tmp_path: Path, text: str = 'name = "run"\n') -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def mistake(tmp_path: Path, *overrides: str, text: str = 'name = "run"\n') -> str:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, text), list(overrides))
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["train.num_step=3"], ["train.num_step", "unknown key", "num_steps", "; perhaps num_steps"]),
        (["runs_dir=''"], ["runs_dir: an empty path is none"]),
        (["runs_dir='what?'"], ["runs_dir: 'what?' has '?'; allowed: a path without any of : , ? \\"]),
        (["runs_dir=~nobody_of_that_name/x"], ["runs_dir: '~nobody_of_that_name/x': there is no such user"]),
        (["tracking.uri=''"], ["tracking.uri: '': allowed: http://HOST:PORT"]),
        (["tracking.experiment=''"], ["tracking.experiment = ''", "at least 1 character"]),
        (["tracking.uri=ftp://host"], ["tracking.uri: 'ftp://host': allowed"]),
        (["tracking.uri=http//host"], ["tracking.uri: 'http//host': allowed"]),
        (
            ["cluster.setup='module load cuda'"],
            ["cluster.setup = 'module load cuda': it must be a list, such as ['modul"],
        ),
        (
            ["resources.minutes=01:00:00"],
            [
                "resources.minutes = 01:00:00: input should be a valid integer; it is: The wall-clock limit",
                "in minutes",
            ],
        ),
        (["resources.memory_gib_per_rank=8G"], ["'8G'", "valid number", "; it is: Host memory of a rank, in GiB"]),
        (["stage_resources.train.minutes=2h"], ["stage_resources.train.minutes = '2h': input should be a valid int"]),
        (["policy.lr=true"], ["policy.lr: true is a switch; allowed: a number"]),
        (["seed=false"], ["seed: false is a switch; allowed: a number"]),
        (["sampling.temperature=true"], ["sampling.temperature: true is a switch; allowed: a number"]),
        (["num_steps=3"], ["num_steps: unknown key", "; perhaps train.num_steps"]),
        (["train.lr=3"], ["train.lr: unknown key", "; perhaps warm_start.lr or policy.lr or drafter.lr"]),
        (["name='my run'"], ["name = 'my run': allowed: letters, digits, ., _ and -, with a letter or a digit first"]),
        (["tracking.uri=sqlite://runs.db"], ["tracking.uri: 'sqlite://runs.db': allowed", "sqlite:///FILE"]),
        (["tracking.uri=sqlite:///:memory:"], ["tracking.uri: 'sqlite:///:memory:': allowed", "sqlite:///FILE"]),
        (["cluster.partition='gpu long'"], ["cluster.partition: 'gpu long' has a blank; allowed: names without"]),
        (["stage_resources.train.account='a b'"], ["stage_resources.train.account: 'a b' has a blank"]),
        (["trains.num_steps=3"], ["trains", "unknown key", "train"]),
        (["stage_resources.train.node=3"], ["stage_resources.train.node", "unknown key", "nodes"]),
        (["stage_resources.trian.nodes=3"], ["trian", "train", "validate"]),
        (["train.num_steps=many"], ["train.num_steps", "many", "integer"]),
        (["train.num_steps=0"], ["train.num_steps", "0", "greater than 0"]),
        (["sampling.temperature=0"], ["sampling.temperature = 0", "0.01 to 2", "nothing could be learned"]),
        (["sampling.temperature=2.1"], ["sampling.temperature = 2.1", "0.01 to 2"]),
        (["sampling.temperature=nan"], ["sampling.temperature", "nan", "finite"]),
        (["seed=4294967296"], ["seed", "4294967296", "less than 4294967296"]),
        (["engine.max_num_seqs=2049"], ["engine.max_num_seqs", "2049", "less than or equal to 2048"]),
        (["policy.beta1=1"], ["policy.beta1", "less than 1"]),
        (["drafter.num_prompts=1"], ["drafter.num_prompts", "1", "greater than or equal to 2"]),
        (["policy.lr=inf"], ["policy.lr", "inf", "finite"]),
        (["sampling.top_k=1"], ["sampling.top_k = 1", "0 (all tokens) or at least 2"]),
        (["sampling.top_k=-1"], ["sampling.top_k = -1", "0 (all tokens) or at least 2"]),
        (["sampling.top_p=1.5"], ["sampling.top_p", "1.5", "less than or equal to 1"]),
        (["speculation.method=medusa"], ["speculation.method", "medusa", "eagle3", "ngram"]),
        (["speculation.k=0"], ["speculation.k = 0", "eagle3", "above 0"]),
        (["speculation.method=none"], ["speculation.k = 3", '"none"', "above 0 with any other method"]),
        (["speculation.method=draft_model"], ["speculation.draft_model is not set", '"draft_model"']),
        (["speculation.draft_model=x"], ["speculation.draft_model = x", '"eagle3"']),
        (["speculation.replay_k=0"], ["speculation.replay_k", "0", "greater than 0"]),
        (["sampling.max_response_tokens=512"], ["sampling.max_response_tokens = 512", "model.max_length = 512"]),
        (["train.samples_per_prompt=1"], ["train.samples_per_prompt", "1", "greater than or equal to 2"]),
        (["policy.tensor_parallel=2"], ["policy.tensor_parallel x policy.pipeline_parallel = 2", "1 ranks"]),
        (
            ["engine.batch_invariant=true"],
            ["engine.batch_invariant = true", "GPUs alone", "gpus_per_rank = 0", "false"],
        ),
        (["engine.sleep=true"], ["engine.sleep = true", "GPU", "gpus_per_rank = 0", "false"]),
        (["engine.tensor_parallel=2"], ["engine.tensor_parallel = 2", "does not divide", "1 ranks"]),
        (
            ["resources.ranks_per_node=2", "policy.pipeline_parallel=2", "stage_resources.calibrate.ranks_per_node=1"],
            ["pipeline_parallel = 2", "calibrate", "ranks_per_node"],
        ),
        (["stage_resources.train.ranks_per_node=3"], ["train.prompts_per_step = 16", "multiple of the 3 engines"]),
        (["train.updates_per_step=3"], ["train.updates_per_step = 3", "train.prompts_per_step = 16"]),
        (["train.loss=ppo"], ['train.loss = "ppo"', "grpo, gspo", "package.module:function"]),
        (["train.loss=3"], ["train.loss = 3", "grpo", "a table with its name"]),
        (["train.loss.clip=0.1"], ["train.loss.clip", "unknown key", "clip_low, clip_high"]),
        (["train.loss.clip_low=x"], ["train.loss.clip_low = 'x'", "valid number"]),
        (['train.correction={name="icepop", range=[2, 3]}'], ["train.correction.range", "[2, 3]", "contain 1"]),
        (["train.advantage=no.such.module:function"], ['train.advantage = "no.such.module:function"', "imported"]),
        (["train.advantage=math:sqrt"], ['train.advantage = "math:sqrt"', "not registered"]),
        (["train.advantage=:sqrt"], ['train.advantage = ":sqrt"', "package.module:function"]),
        (["policy.lr_schedule=step"], ["policy.lr_schedule = 'step'", "constant", "linear", "cosine"]),
        (["data.source=file"], ["data.path", 'data.source = "file"']),
        (["data.path=problems.jsonl"], ["data.path", 'data.source = "file"']),
        (["model.tiny.num_heads=5"], ["num_heads = 5", "hidden_size"]),
        (["name=a b"], ["name", "a b"]),
        (["train=3"], ["train = 3", "a section", "num_steps"]),
        (["stage_resources=3"], ["stage_resources = 3", "a section", "prepare", "export"]),
        (["data.generators=[{}]"], ["data.generators.0.name: required"]),
        (["data.generators=[{name='x', weigth=2}]"], ["data.generators.0.weigth", "unknown key", "weight"]),
        (["data.generators=[{name='x', parameters={a={b=1}}}]"], ["data.generators.0.parameters.a", "a number"]),
        (["data.generators=[{name='x', parameters={a=[[1]]}}]"], ["data.generators.0.parameters.a = [[1]]"]),
        (["validate.sets.x.reward=[{name='task', wieght=1}]"], ["validate.sets.x.reward.0.wieght", "name, weight"]),
    ],
)
def test_a_wrong_key_type_or_combination_is_one_line_that_names_it(
    tmp_path: Path, overrides: list[str], parts: list[str]
) -> None:
    line = mistake(tmp_path, *overrides)
    assert "\n" not in line
    assert [part for part in parts if part not in line] == []


OF_A_FILE = "data.source=file", "data.path=a.jsonl"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["speculation.method=replay", "speculation.k=5"], ["speculation.k = 5", '"replay"', "replay_k", "3"]),
        (["speculation.method=ngram", "drafter.source=a/b"], ['drafter.source = "a/b"', '"ngram"', "eagle3"]),
        (["speculation.method=ngram", "drafter.data=x.jsonl"], ['drafter.data = "x.jsonl"', '"ngram"', "mtp"]),
        (
            [*OF_A_FILE, "data.validation_path=b.jsonl", "data.validation_fraction=0.3"],
            ["data.validation_fraction = 0.3", 'data.validation_path = "b.jsonl"', "leave one"],
        ),
        (["data.validation_path=b.jsonl"], ['data.validation_path = "b.jsonl"', '"generators"', '"file"']),
        (
            ["train.keep_every=6", "train.checkpoint_every=4"],
            ["train.keep_every = 6", "train.checkpoint_every = 4", "multiple of 4"],
        ),
        (
            ["train.stop_when={metric='policy/entrpy', above=1}"],
            ['train.stop_when.metric = "policy/entrpy"', "grpo", "did you mean policy/entropy?"],
        ),
        (
            ["train.stop_when={metric='policy/clip_fracton', above=1}", "train.loss=gspo", "train.updates_per_step=2"],
            ['"policy/clip_fracton"', "gspo", "did you mean policy/clip_fraction?"],
        ),
        (
            ["train.stop_when={metric='spec/acceptance_rate_pos_I', above=1}"],
            ['"spec/acceptance_rate_pos_I"', "spec/acceptance_rate_pos_1"],
        ),
        (
            ["data.chat_template_kwargs={enable_thinking=false}", "data.template='Q: {prompt}'"],
            ['data.chat_template_kwargs = {"enable_thinking": false}', '"Q: {prompt}"', 'take "chat"'],
        ),
        (["train.loss=gspo"], ['train.loss = "gspo"', "train.updates_per_step = 1", '"grpo"']),
        (["train.loss.clip_high=0.4"], ["train.loss.clip_high = 0.4", "train.updates_per_step = 1", "0.28"]),
        (["train.kl_in=reward"], ['train.kl_in = "reward"', "train.kl_coef = 0", "above 0"]),
        (["train.reference_every=5"], ["train.reference_every = 5", "train.kl_coef = 0", "above 0"]),
        (["train.kl_coef=0.1", "train.kl_estimator=k1"], ['train.kl_estimator = "k1"', '"loss"', '"k2"', '"reward"']),
        (["train.stop_when={metric='reward/mena', above=1}"], ['"reward/mena"', "did you mean reward/mean?"]),
    ],
)
def test_a_setting_without_an_effect_is_one_line_but_loads_where_it_is_stored(
    tmp_path: Path, overrides: list[str], parts: list[str]
) -> None:
    line = mistake(tmp_path, *overrides)
    assert "\n" not in line
    assert [part for part in parts if part not in line] == []
    if "reward/mena" not in line:  # which no version has accepted
        config = change_config(parse_config({"name": "run"}), overrides)
        assert config.unused == [line]
        assert parse_config(json.loads(dump_config(config))) == config


@pytest.mark.parametrize(
    "overrides",
    [
        ["speculation.method=ngram", "speculation.k=5", "drafter.draft_vocab_size=64", "drafter.num_prompts=8"],
        ["speculation.method=eagle3+replay", "speculation.k=5", "drafter.source=a/b", "drafter.data=x.jsonl"],
        ["speculation.method=none", "speculation.k=0"],
        ["speculation.method=mtp", "drafter.data=x.jsonl"],
        [*OF_A_FILE, "data.validation_path=b.jsonl"],
        [
            *OF_A_FILE,
            "data.validation_path=b.jsonl",
            "data.validation_fraction=0.3",
            "validate.sets.x.generators=[{name='chain_sum'}]",
        ],
        ["data.validation_fraction=0.3"],
        ["train.keep_every=8", "train.checkpoint_every=4"],
        ["train.keep_every=1", "train.checkpoint_every=4"],
        ["train.stop_when={metric='policy/clip_fraction', above=0.5}"],
        ["train.stop_when={metric='spec/acceptance_rate_pos_2', below=0.5}"],
        ["train.stop_when={metric='spec/recent_accepted_tokens', below=5}"],
        ["train.stop_when={metric='drafter/expected_acceptance_pos_0', above=0.9}"],
        ["train.stop_when={metric='validation/held-out/pass_at_1', above=0.9}", "validate.every=1"],
    ],
)
def test_a_setting_with_an_effect_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    assert load_config(write(tmp_path), overrides).unused == []


@pytest.mark.parametrize(
    ("before", "overrides", "refused"),
    [
        ({"drafter": {"source": "a/b"}}, ["speculation.method=ngram"], 0),
        ({"speculation": {"method": "ngram"}}, ["drafter.source=a/b"], 1),
        ({"train": {"loss": "gspo", "updates_per_step": 2}}, ["train.updates_per_step=1"], 1),
        ({"train": {"loss": "gspo"}}, ["policy.lr=1e-6"], 0),
        ({}, ["train.loss=gspo"], 1),
    ],
)
def test_a_change_of_a_run_is_refused_for_what_it_leaves_without_an_effect_unless_another_method_does(
    before: dict[str, Any], overrides: list[str], refused: int
) -> None:
    old = parse_config({"name": "run", **before})
    new = change_config(old, overrides)
    assert len(new.unused_after([change.key for change in config_changes(old, new)])) == refused


def test_a_metric_that_only_the_run_can_name_may_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOSSES, "_by_name", dict(LOSSES._by_name))
    LOSSES.register("silent")(print)
    LOSSES.register("plain", metrics=("ratio",))(len)
    stop = "train.stop_when={{metric='{}', above=1}}".format
    assert load_config(write(tmp_path), ["train.loss=silent", stop("policy/any")]).unused == []
    assert load_config(write(tmp_path), ["train.loss=plain", stop("policy/ratio")]).unused == []
    assert "did you mean policy/ratio?" in mistake(tmp_path, "train.loss=plain", stop("policy/ratoi"))


def test_every_mistake_gets_its_own_line(tmp_path: Path) -> None:
    lines = mistake(tmp_path, "train.num_steps=0", "policy.lr=-1", "seed=x").splitlines()
    assert [line.split(" ")[0] for line in lines] == ["seed", "policy.lr", "train.num_steps"]


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.num_steps", "expected key=value"),
        ("=3", "expected key=value"),
        ("name.x=3", "name is a value, not a section"),
    ],
)
def test_a_bad_override_is_quoted(tmp_path: Path, override: str, part: str) -> None:
    line = mistake(tmp_path, override)
    assert repr(override) in line
    assert part in line


def test_a_missing_file_and_bad_toml_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file at .*absent\.toml"):
        load_config(tmp_path / "absent.toml")
    assert "run.toml is not valid TOML" in mistake(tmp_path, text="name = \n")
    text = mistake(tmp_path, text="seed = 1\n[resources]\nminutes = 2:00:00\n")
    assert text.endswith("(at line 3, column 12): 'minutes = 2:00:00'")


def test_a_configuration_may_come_from_a_pipe() -> None:
    reading, writing = os.pipe()  # as the shell's <(...) has it
    os.write(writing, b'name = "piped"\n')
    os.close(writing)
    assert load_config(Path(f"/dev/fd/{reading}")).name == "piped"
    os.close(reading)


def test_a_file_without_a_name_is_told_so(tmp_path: Path) -> None:
    assert mistake(tmp_path, text="seed = 1\n").startswith("name")


def test_overrides_are_read_as_toml_and_else_as_strings(tmp_path: Path) -> None:
    overrides = [
        "train.num_steps=10",
        "policy.lr=3e-6",
        "policy.recompute=true",
        "validate.speed_batches=[1, 2]",
        "model.source=org/model",
        'data.generators=[{name = "chain_sum", parameters = {max_terms = 3}}]',
        "stage_resources.train.minutes=7",
        "data.template=",
    ]
    config = load_config(write(tmp_path), overrides)
    assert (config.train.num_steps, config.policy.lr, config.policy.recompute) == (10, 3e-6, True)
    assert config.validate_.speed_batches == (1, 2)
    assert config.model.source == "org/model"
    assert config.data.generators[0].parameters == {"max_terms": 3}
    assert config.resources_of("train").minutes == 7
    assert config.data.template == ""


def test_an_override_may_contain_an_equals_sign(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), ["tracking.uri=http://host/?a=b"])
    assert config.tracking.uri == "http://host/?a=b"


def test_an_algorithm_is_a_name_or_a_table_with_options(tmp_path: Path) -> None:
    several = "train.updates_per_step=2"
    train = load_config(write(tmp_path), ["train.correction=icepop", "train.loss.clip_low=0.1", several]).train
    assert str(train.correction) == "icepop (range = [0.5, 5.0])"
    assert train.loss.name == "grpo" and train.loss.options == {"clip_low": 0.1, "clip_high": 0.28}
    table = '[train]\nadvantage = { name = "grpo", normalize_by_std = false }\n'
    train = load_config(write(tmp_path, f'name = "run"\n{table}'), ["train.loss=gspo", several]).train
    assert train.advantage.options == {"normalize_by_std": False}
    assert train.loss.name == "gspo"


def test_a_stored_configuration_is_read_where_its_own_functions_are_not(tmp_path: Path) -> None:
    loss = {"name": "not_here:loss", "clip": 0.1}
    config = parse_config({"name": "run", "train": {"loss": loss}})
    assert json.loads(dump_config(config))["train"]["loss"] == loss
    assert parse_config(json.loads(dump_config(config))) == config


def test_validating_a_configuration_imports_no_torch() -> None:
    script = "import sys; from specrl.config import Config; print(Config(name='x').train.loss, 'torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "grpo (clip_low = 0.2, clip_high = 0.28) False"


def test_a_configuration_cannot_be_changed(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        config.train.num_steps = 3  # type: ignore[misc]


def test_stages_inherit_resources_and_override_them(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), ["resources.minutes=5", "stage_resources.train.ranks_per_node=2"])
    assert config.resources_of("train").ranks == 2
    assert config.resources_of("export").ranks == 1
    assert {config.resources_of(stage).minutes for stage in STAGES} == {5}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_files_validate_and_survive_json(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert parse_config(json.loads(dump_config(config))) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_files_name_generators_that_exist(path: Path) -> None:
    from specrl.data.generators import make_generator

    config = load_config(path)
    assert all(make_generator(generator) for generator in config.data.generators)


def test_a_preset_stands_for_its_settings_and_for_nothing_beside_them() -> None:
    config = parse_config({"name": "a", "train": {"algorithm": "dr-grpo"}})
    assert (config.train.algorithm, config.train.loss_mean) == (None, "constant")
    assert config.train.advantage.options == {"normalize_by_std": False}
    assert parse_config(json.loads(dump_config(config))) == config
    with pytest.raises(ConfigError, match=r'train.algorithm = "ppo": allowed: dapo, dr-grpo, gspo, cispo, rloo, reinf'):
        parse_config({"name": "a", "train": {"algorithm": "ppo"}})
    with pytest.raises(ConfigError, match=r'train.algorithm = "rloo" sets train.advantage, too: leave it out'):
        parse_config({"name": "a", "train": {"algorithm": "rloo", "advantage": "grpo"}})


def test_a_preset_replaces_what_it_stands_for_in_the_configuration_of_a_run() -> None:
    config = parse_config({"name": "a", "train": {"loss_mean": "response", "updates_per_step": 2, "kl_coef": 0.1}})
    train = change_config(config, ["train.algorithm=dapo"]).train
    assert (
        train
        == parse_config({"name": "a", "train": {"algorithm": "dapo", "updates_per_step": 2, "kl_coef": 0.1}}).train
    )
    for both in (["train.algorithm=rloo", "train.loss_mean=token"], ["train.loss_mean=token", "train.algorithm=rloo"]):
        with pytest.raises(ConfigError, match=r'train.algorithm = "rloo" sets train.loss_mean, too'):
            change_config(config, both)
    with pytest.raises(ConfigError, match=r'train.algorithm = \["rloo"\]: allowed: dapo'):
        change_config(config, ["train.algorithm=['rloo']"])
    with pytest.raises(ConfigError, match=r"train.updates_per_step"):
        change_config(config, ['train={algorithm="gspo", updates_per_step=0}'])


def test_dapo_is_all_of_its_techniques() -> None:
    train = parse_config({"name": "a", "train": {"algorithm": "dapo", "updates_per_step": 2}}).train
    assert train.loss.options == {"clip_low": 0.2, "clip_high": 0.28} and train.loss_mean == "token"
    assert (train.refill_rounds, train.overlong_filter, train.overlong_window, train.kl_coef) == (9, True, 0.2, 0.0)
    with pytest.raises(ConfigError, match=r'train.algorithm = "dapo" sets train.refill_rounds, too'):
        parse_config({"name": "a", "train": {"algorithm": "dapo", "refill_rounds": 2}})
