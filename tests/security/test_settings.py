"""No setting becomes a line of a script, an option of another name, or a line of a log."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from flows.cli import EXIT_USAGE, invoke
from flows.folder import anchor
from slurm.backend import StageRequest
from slurm.environment import ROOT, job_environment
from slurm.slurm_backend import SlurmBackend
from specrl.config import Config, ConfigError, parse_config
from specrl.config.algorithms import Algorithm
from specrl.config.text import MULTILINE
from specrl.context import StageContext

CONTROLS = ("\n", "\r", "\x00", "\x1b[2J", "\x07", "\x7f", "\x85", "\x9b", "\u2028", "\u2029", "\u202e", "\udc80")
CANARY = "canary"
HOSTILE = (
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"; touch {CANARY} #",
    f"' ; touch {CANARY} ; '",
    f'" ; touch {CANARY} ; "',
    f"x && touch {CANARY}",
    f"x | touch {CANARY}",
    f"${{x:-$(touch {CANARY})}}",
    "x #SBATCH --uid=0",
    "x' --uid=0 '",
    "*",
    "~root",
    "{a,b}",
    "!!",
    "--wrap=true",
    "-x",
    "x\\' --uid=0 \\'",
)
REQUIRED: dict[str, Any] = {
    "cluster.container": {"kind": "apptainer", "image": "image.sif"},
    "data.generators": [{"name": "worked_sums"}],
    "validate.sets.*.generators": [{"name": "worked_sums"}],
    "train.stop_when": {"metric": "reward/mean", "above": 1.0},
}
"""What must stand beside a setting in its section."""
FREE = {
    "runs_dir",
    "model.source",
    "data.template",
    "data.path",
    "cluster.partition",
    "cluster.account",
    "cluster.qos",
    "cluster.constraint",
    "cluster.sbatch.*",
    "cluster.python",
    "cluster.container.image",
    "cluster.cache_dir",
    "cluster.interface",
    "cluster.environment_file",
    "stage_resources.*.qos",
    "tracking.experiment",
}
"""Settings that take any text, so that the test below must have seen some of it in a script."""
NAMES = {"validate.sets": "held-out", "stage_resources": "train"}
"""A key of the dicts whose keys are restricted; others get one of their own."""
NEEDS = {
    "data.path": {"data": {"source": "file"}},
    "data.validation_path": {"data": {"source": "file", "path": "problems.jsonl"}},
}


def text_settings(kind: Any, key: str = "") -> Iterator[str]:
    """The keys of all settings that are text, with a number for a member of a list and `*` for one of a dict."""
    if get_origin(kind) is Annotated:
        yield from text_settings(get_args(kind)[0], key)
    elif isinstance(kind, type) and issubclass(kind, Algorithm):
        yield from (f"{key}.name", f"{key}.option")
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from text_settings(field.annotation, f"{key}.{field.alias or name}".lstrip("."))
    elif get_origin(kind) is dict:
        yield from text_settings(get_args(kind)[1], f"{key}.*")
    elif get_origin(kind) in (tuple, list):
        yield from text_settings(get_args(kind)[0], f"{key}.0")
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from text_settings(member, key)
    elif get_origin(kind) is Literal or kind in (str, Path):
        yield key


SETTINGS = list(dict.fromkeys(text_settings(Config)))
SHELL_LINES = "cluster.setup.0"
"""The one setting whose text is run by a shell, because it is meant to be."""


def with_setting(key: str, value: str, **more: Any) -> dict[str, Any]:
    """The data of a configuration with a value at a key, and what must stand beside it."""
    data: dict[str, Any] = {"name": "run", **{section: dict(values) for section, values in NEEDS.get(key, {}).items()}}
    place: Any = data
    parts = key.split(".")
    for depth, part in enumerate(parts[:-1]):
        path = ".".join(parts[: depth + 1])
        name = NAMES.get(".".join(parts[:depth]), "parameter") if part == "*" else int(part) if part == "0" else part
        beside = REQUIRED.get(path, [{}] if parts[depth + 1] == "0" else {})
        if isinstance(place, list):
            place = place[int(name)]
            continue
        place = place.setdefault(
            name, [dict(member) for member in beside] if isinstance(beside, list) else dict(beside)
        )
    last = parts[-1]
    if last == "0":
        place[0] = value
    else:
        place["comment" if last == "*" else last] = value
    for section, values in more.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return data


def test_the_walk_finds_settings_of_all_kinds() -> None:
    for key in (
        "name",
        "runs_dir",
        "cluster.partition",
        "cluster.container.image",
        "cluster.container.mounts.0",
        "cluster.sbatch.*",
        "cluster.setup.0",
        "cluster.environment_file",
        "stage_resources.*.qos",
        "data.template",
        "data.generators.0.name",
        "data.generators.0.parameters.*",
        "validate.sets.*.path.0",
        "train.loss.name",
        "tracking.uri",
        "drafter.source",
    ):
        assert key in SETTINGS
    assert len(SETTINGS) > 50


@pytest.mark.parametrize("key", SETTINGS)
def test_control_characters_are_refused_in_every_setting(key: str) -> None:
    for control in CONTROLS:
        if any(fnmatchcase(key, name) for name in MULTILINE) and control == "\n":
            continue
        with pytest.raises(ConfigError) as refused:
            parse_config(with_setting(key, f"a{control}b"))
        [line] = str(refused.value).splitlines()
        assert line.isprintable()
        named = key.replace("*", "").split(".")
        assert all(part in line for part in named)
        assert repr(control)[1:-1][:4] in line
        assert "allowed: " in line


def test_control_characters_are_refused_in_every_key() -> None:
    given: list[dict[str, Any]] = [
        {"na\x1bme": "x"},
        {"cluster": {"sbatch": {"comm\nent": "x"}}},
        {"data": {"generators": [{"name": "worked_sums", "parameters": {"a\u2028b": 1}}]}},
        {"validate": {"sets": {"a\nb": {}}}},
        {"stage_resources": {"tra\x00in": {}}},
        {"train": {"loss": {"name": "grpo", "cl\x1bip": 0.2}}},
    ]
    for data in given:
        with pytest.raises(ConfigError, match=r"the key '.*' has the control character") as refused:
            parse_config({"name": "run", **data})
        assert str(refused.value).isprintable()


def test_only_what_is_asked_may_have_several_lines() -> None:
    prompts = ("data.template", "data.system_prompt", "*.reward.*.parameters.template")
    assert (*prompts, "sampling.stop.*") == MULTILINE
    assert parse_config({"name": "run", "sampling": {"stop": ["\nQ:"]}}).sampling.stop == ("\nQ:",)
    judge = {"name": "judge", "parameters": {"url": "http://judge/v1", "model": "m", "template": "{response}\nScore?"}}
    assert parse_config({"name": "run", "data": {"reward": [judge]}}).data.reward[0].parameters == judge["parameters"]
    template = "Solve:\n\n\t{prompt}\n"
    assert parse_config({"name": "run", "data": {"template": template}}).data.template == template
    chat = {"template": "chat", "system_prompt": "Think.\nThen answer."}
    assert parse_config({"name": "run", "data": chat}).data.system_prompt == "Think.\nThen answer."


@pytest.mark.parametrize("key", ["partition", "account", "qos", "constraint", "python", "sbatch.reservation"])
@pytest.mark.parametrize("value", ["--uid=0", "-x", "x\\"])
def test_a_value_that_sbatch_could_take_for_something_else_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster.{key.split('.', maxsplit=1)[0]}\W") as refused:
        parse_config(with_setting(f"cluster.{key}", value))
    assert len(str(refused.value).splitlines()) == 1
    if "." not in key:
        with pytest.raises(ConfigError, match="cluster"):
            parse_config(with_setting(f"cluster.{key}", ""))


def test_an_option_of_sbatch_is_no_line_of_the_setup() -> None:
    with pytest.raises(ConfigError, match=r"cluster.setup.0: '#SBATCH --uid=0' is an option of sbatch.*cluster.sbatch"):
        parse_config(with_setting(SHELL_LINES, "#SBATCH --uid=0"))


def test_a_dry_run_says_in_one_line_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('name = "run"\n[cluster]\npartition = "gpu\\ntouch canary\\n#"\n')
    assert invoke(["run", "run.toml", "--dry-run"]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert said.startswith(
        "specrl: cluster.partition = 'gpu\\ntouch canary\\n#' has the control character '\\n'; allowed:"
    )
    assert len(said.splitlines()) == 1
    Path("run.toml").write_text('name = "run"\n')
    for setting in ("cluster.qos=a\x1bb", "cluster.q\x1bos=a", "name.\x1bx=1", 'cluster.sbatch.comment="a\\u2028b"'):
        assert invoke(["run", "run.toml", "--dry-run", "--set", setting]) == EXIT_USAGE
        said = capsys.readouterr().err
        assert said.endswith("\n")
        assert said[:-1].isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_the_present_folder_is_no_setting_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a\ntouch canary\n#", "a:b", "a\\b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with pytest.raises(ConfigError, match=r"^runs_dir"):
            anchor(Config(name="run"))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, first on the PATH, with programs that stand for those of a cluster: they note how they were called."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("srun", "scontrol", "python", "python3", "apptainer"):
        (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >>"{folder}/calls"\n')
    (folder / "sbatch").write_text(f'#!/bin/sh\ncp "$1" "{folder}/script"\necho Submitted batch job 1\n')
    for path in folder.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def submitted(config: Config, programs: Path) -> str:
    """The script with which Slurm is asked to run a stage."""
    stage_dir = config.run_dir / "stages" / "train-0"
    context = StageContext(config, "train", "train-0", stage_dir, {}, "")
    request = StageRequest(context, "specrl.stages.train:main", config.run_dir / "code" / "0123")
    request.key.folder.mkdir(parents=True)
    SlurmBackend().submit(request, job_environment(ROOT, config))
    return (programs / "script").read_text()


def run_script(script: str, folder: Path) -> None:
    """Check a script's syntax and run it in a real bash, in a folder of its own."""
    for command in (["bash", "-n"], ["bash"]):
        done = subprocess.run(
            command, input=script, cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stderr == ""


def test_a_line_that_is_not_quoted_would_be_noticed(tmp_path: Path, programs: Path) -> None:
    config = parse_config(with_setting(SHELL_LINES, f"touch {CANARY}", runs_dir=str(tmp_path)))
    run_script(submitted(config, programs), tmp_path)
    assert (tmp_path / CANARY).exists()


@pytest.mark.parametrize("key", [key for key in SETTINGS if key != SHELL_LINES])
def test_nothing_of_a_setting_runs_in_a_job(key: str, tmp_path: Path, programs: Path) -> None:
    plain_script = submitted(parse_config(with_setting("name", "run", runs_dir=str(tmp_path / "plain"))), programs)
    usual = option_names(plain_script)
    taken = 0
    for number, value in enumerate(HOSTILE):
        scratch = tmp_path / f"{number}"
        scratch.mkdir()
        runs_dir = str(scratch / value) if key == "runs_dir" else str(scratch / "runs")
        try:
            config = parse_config(with_setting(key, runs_dir if key == "runs_dir" else value, runs_dir=runs_dir))
        except ConfigError as refused:
            assert all(line.isprintable() for line in str(refused).splitlines())
            continue
        taken += 1
        script = submitted(config, programs)
        run_script(script, scratch)
        assert not list(tmp_path.rglob(CANARY))
        assert option_names(script) - usual <= {"--account", "--comment", "--constraint", "--partition", "--qos"}
        asked = [words(line) for line in script.splitlines() if line.startswith("#SBATCH")]
        assert all(len(line) == 2 for line in asked)
        if key in ("cluster.partition", "cluster.sbatch.*", "stage_resources.*.qos"):
            assert any(line[1].partition("=")[2] == value for line in asked)
    assert taken or key not in FREE


def words(line: str) -> list[str]:
    return shlex.split(line.removeprefix("#"))


def option_names(script: str) -> set[str]:
    """The options that a script asks sbatch for."""
    return {words(line)[1].partition("=")[0] for line in script.splitlines() if line.startswith("#SBATCH")}
