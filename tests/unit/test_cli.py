from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import httpx
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from flows import cli
from flows.change import change_run
from flows.cli import invoke
from flows.commands.options import load
from flows.execute import begin_run, resume_in_process
from flows.folder import anchor, only_flow, write_config
from flows.origin import ORIGIN, Origin, own_source, start_from
from flows.preflight import check_disk, check_draft_model, check_tracking, doubts
from flows.server import PrefectServer, ServerError
from slurm import environment, submit
from slurm.backend import JobError
from slurm.environment import PACKAGES, snapshot_code
from slurm.failures import last_error
from slurm.trust import sources_digest
from specrl.checks.gpu import GIB
from specrl.config import Config, ConfigError, change_config, dump_config, load_config, parse_config, understood_config
from specrl.lineage.record import Continuation, read_record, write_record
from specrl.models.checks.headers import tensor_shapes
from specrl.models.shapes import model_shape
from specrl.projection.memory import MASTER_AND_MOMENTS
from tasks.run import begin

ROOT = Path(__file__).parents[2]
BASE = """
name = "run"
[model]
source = "tiny"
max_length = 128
[sampling]
max_response_tokens = 64
[drafter]
draft_vocab_size = 64
"""


def write(folder: Path, more: str = "") -> str:
    path = folder / "run.toml"
    path.write_text(BASE + more)
    return str(path)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line a command line is refused with."""
    assert invoke(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("specrl: ")
    return lines[0]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("uri", "variable"),
    [
        ("http://user:secret@mlflow", "MLFLOW_TRACKING_PASSWORD"),
        ("https://secret@mlflow", "MLFLOW_TRACKING_TOKEN"),
        ("postgresql://user:secret@db/mlflow", "PGPASSWORD"),
        ("postgresql://db/mlflow?user=me&password=secret", "PGPASSWORD"),
        ("postgresql://db/mlflow?user=me&SSLPassword=secret", "PGPASSWORD"),
        ("mssql+pyodbc://db/mlflow?driver=ODBC&Pwd=secret", "PGPASSWORD"),
        ("mssql+pyodbc:///?odbc_connect=Server%3Ddb%3BUID%3Dme%3BPWD%3Dsecret", "PGPASSWORD"),
    ],
)
def test_a_password_for_mlflow_is_refused_and_neither_printed_nor_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], uri: str, variable: str
) -> None:
    line = complaint(capsys, "run", write(tmp_path), "--set", f"tracking.uri={uri}")
    assert variable in line and "secret" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=3", "train.steps: unknown key"),
        ("train.num_steps=many", "train.num_steps = 'many'"),
        ("model.source=./nowhere", "nowhere"),
        ("speculation.k=0", "speculation.k = 0"),
        ("sampling.max_response_tokens=500", "sampling.max_response_tokens = 500"),
        ("stage_resources.train.ranks_per_node=3", "3 engines"),
        ("train.keep_checkpoints=100000000000", "too little free disk"),
        ("tracking.uri=http://127.0.0.1:9", "tracking.uri = http://127.0.0.1:9: no MLflow server answers"),
        ('data={source="file",path="missing.jsonl"}', "missing.jsonl: there is no such file"),
        ("data.reward=nowhere.module:function", 'data.reward = "nowhere.module:function"'),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    override: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = complaint(capsys, "run", write(tmp_path), "--set", override)
    assert words in line
    assert "secret" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Missing argument"),
        (["run", "nowhere.toml"], "no configuration file at nowhere.toml"),
        (["run", "x.toml", "--fast"], "No such option"),
        (["walk"], "No such command"),
        (["run", "x.toml", "train.num_steps=3"], "(train.num_steps=3); a setting is given as --set KEY=VALUE"),
        (
            ["run", "run.toml", "--cluster", "pbs"],
            "cluster.backend = 'pbs': allowed: local, slurm, or ",
        ),
        (["run", "run.toml", "--dry-run", "--cluster", "no:Where"], 'cluster.backend = "no:Where" cannot be imported'),
        (["run", "run.toml", "--dry-run", "--cluster", "uuid:UUID"], 'cluster.backend = "uuid:UUID" cannot be made: '),
        (["resume", "nobody"], "no run nobody"),
        (["show", "nobody"], "no run nobody"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert words in complaint(capsys, *arguments)


def test_a_command_without_settings_speaks_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "show", "x", "train.num_steps=3").endswith("(train.num_steps=3)")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("command", "then"), [("run", "make room, and go on with specrl resume RUN"), ("samples", "make room first")]
)
def test_a_full_disk_is_one_line(
    command: str, then: str, number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError(number, "No room", "here")

    monkeypatch.setattr(cli, "app", fail)
    assert invoke([command, "x"]) == 1
    assert capsys.readouterr().err == f"specrl: here: No room; {then}\n"


def test_an_interrupt_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Path) -> list[Path]:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.commands.inspect.list_runs", interrupt)
    assert invoke(["ls"]) == 130
    assert capsys.readouterr().err == "specrl: interrupted\n"


def test_an_interrupt_that_ends_a_page_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.commands.inspect.subprocess.run", interrupt)
    assert invoke(["ui", "--runs-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENAMETOOLONG, errno.EACCES])
def test_any_error_of_a_file_system_is_one_line(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError(number, "It says why", "here")

    monkeypatch.setattr(cli, "app", fail)
    assert invoke(["ls"]) == 1
    assert capsys.readouterr().err == "specrl: here: It says why\n"


def test_the_version_and_the_exit_codes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specrl ")
    assert invoke(["--help"]) == 0
    assert "3 stopped by specrl stop" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_no_line_of_the_help_is_cut(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert invoke([*words, "--help"]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.endswith("...") and "[ARGS]" not in line]


def test_the_folder_of_the_runs_is_named_once_in_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRL_RUNS_DIR", str(tmp_path / "elsewhere"))
    assert invoke(["ls"]) == 0
    assert f"no runs in {tmp_path}/elsewhere, which is no folder; begin with" in capsys.readouterr().out.replace(
        "\n", " "
    )
    assert load_config(Path(write(tmp_path))).run_dir == tmp_path / "elsewhere" / "run"
    assert load_config(Path(write(tmp_path)), ["runs_dir=here"]).runs_dir == Path("here")


def test_variables_and_the_home_folder_stand_for_their_values_in_folders_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("SPECRL_RUNS_DIR", "$HOME/elsewhere")
    for arguments, folder in ((["ls"], "elsewhere"), (["ls", "--runs-dir=~/mine"], "mine")):  # as bash leaves it
        assert invoke(arguments) == 0
        assert f"no runs in {tmp_path}/{folder}, " in capsys.readouterr().out
    assert load_config(Path(write(tmp_path))).run_dir == tmp_path / "elsewhere" / "run"
    for words in (("ls", "--runs-dir=$NOT_THERE/x"), ("export", "x", "--format", "policy", "--to=$NOT_THERE/x")):
        name = words[-1].partition("=")[0]
        assert complaint(capsys, *words) == f"specrl: {name}: '$NOT_THERE/x': the variable $NOT_THERE is not set"
    monkeypatch.setenv("SPECRL_RUNS_DIR", "$NOT_THERE/x")
    assert complaint(capsys, "run", write(tmp_path)) == (
        "specrl: runs_dir: '$NOT_THERE/x': the variable $NOT_THERE is not set"
    )
    said = "specrl: SPECRL_RUNS_DIR: '$NOT_THERE/x': the variable $NOT_THERE is not set"
    assert complaint(capsys, "ls") == said
    # A run of which nothing is understood, not even what stands for its folder.
    assert understood_config({"runs_dir": ""}, tmp_path / "run").run_dir == tmp_path / "run"


@pytest.mark.parametrize("cron", ["0 2 * *", "0 25 * * *", "0 0 2 * * *", "daily", ""])
def test_a_wrong_schedule_is_one_line_before_anything_starts(
    cron: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = complaint(capsys, "serve", write(tmp_path), "--cron", cron)
    assert line.startswith(f"specrl: --cron {cron!r}: ")
    assert "allowed: five cron fields" in line
    line = complaint(capsys, "serve", write(tmp_path), "--cron", "0 2 * * *", "--time-zone", "Berlin")
    assert line == "specrl: --time-zone 'Berlin': allowed: a name such as UTC or Europe/Berlin"
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_scheduled_flow_has_parameters_that_prefect_shows_and_checks(tmp_path: Path) -> None:
    from prefect.utilities.callables import parameter_schema

    from flows.scheduled import config_at, scheduled

    fields = parameter_schema(scheduled).properties
    assert fields["config"]["type"] == "object"
    assert fields["overrides"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    config = json.loads(dump_config(load(Path(write(tmp_path)), None, None)))
    chosen = config_at(datetime(2026, 3, 29, 1, 30, tzinfo=UTC), config, ["train.num_steps=3"])
    assert (chosen.name, chosen.train.num_steps) == ("run-20260329-0130", 3)


def test_a_configuration_that_is_not_utf8_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes('name = "läuft"\n'.encode("latin-1"))
    assert "run.toml is not UTF-8 text" in complaint(capsys, "run", str(path))


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", write(tmp_path), "--dry-run", "--cluster", "slurm"]) == 0
    output = capsys.readouterr().out
    assert all(stage in output for stage in ("prepare", "pretrain", "calibrate", "train", "validate", "export"))
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_the_plan_of_a_dry_run_is_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--set", "stage_resources.train={gpus_per_rank=1,ranks_per_node=2,minutes=90}"]
    assert invoke(["run", write(tmp_path), "--dry-run", "--json", "--cluster", "slurm", *asked]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["run"] == "run"
    assert plan["most_gpu_hours"] == 3.0
    assert plan["jobs"]["train"]["ranks_per_node"] == 2
    assert "--gpus-per-node=2" in plan["jobs"]["train"]["submission"]
    assert {budget["stage"] for budget in plan["budgets"]} >= {"train", "validate"}
    assert "--json is for --dry-run" in complaint(capsys, "run", write(tmp_path), "--json")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.keep_checkpoints=100000000000", "too little free disk"),
        ("tracking.uri=http://127.0.0.1:9", "tracking.uri = http://127.0.0.1:9: no MLflow server answers"),
        ('data={source="file",path="missing.jsonl"}', "missing.jsonl: there is no such file"),
        ("data.generators=[{name='worked_sum'}]", "did you mean worked_sums"),
        ("data.reward=nowhere.module:function", 'data.reward = "nowhere.module:function"'),
        ("speculation={method='draft_model',draft_model='nowhere'}", "speculation.draft_model: "),
    ],
)
def test_a_dry_run_prints_the_plan_and_then_what_a_start_would_be_refused_for(
    override: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["run", write(tmp_path), "--dry-run", "--set", override]) == 2
    printed = capsys.readouterr()
    assert "Memory of one rank" in printed.out
    (line,) = printed.err.splitlines()
    assert words in line
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_the_checks_of_a_dry_run_import_neither_torch_nor_vllm(tmp_path: Path) -> None:
    path = write(tmp_path, '[data]\ngenerators = [{ name = "chain_sum" }]\n')
    script = (
        f"import sys; from flows.cli import invoke; code = invoke(['run', {path!r}, '--dry-run', *sys.argv[1:]])\n"
        "names = ('torch', 'vllm', 'mlflow', 'transformers', 'megatron', 'prefect')\n"
        "print(code, [name for name in names if name in sys.modules])"
    )
    for source in ("tiny", "smollm2-135m"):
        command = [sys.executable, "-c", script, "--set", f"model.source={source}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "0 []"
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_runs_are_listed_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["ls"]) == 0
    assert "no runs in" in capsys.readouterr().out
    config = a_run(tmp_path)
    (config.run_dir / "stages" / "prepare-0").mkdir(parents=True)
    (config.run_dir / "stages" / "prepare-0" / "result.json").write_text("{}")
    assert invoke(["ls"]) == 0
    row = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert row[:4] == ["run", "stopped", "1/6", "tiny"]


def test_a_run_whose_configuration_is_broken_and_that_has_no_record_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = a_run(tmp_path)
    broken = config.runs_dir / "broken"
    (broken / "stages").mkdir(parents=True)
    (broken / "config.json").write_text('{"name": "bro')
    (config.runs_dir / "model").mkdir()
    (config.runs_dir / "model" / "config.json").write_text('{"model_type": "llama"}')
    assert invoke(["ls", "--json"]) == 0
    assert [(run["run"], run["state"], run["model"]) for run in json.loads(capsys.readouterr().out)] == [
        ("run", "stopped", "tiny"),
        ("broken", "unreadable", "?"),
    ]
    assert invoke(["ls"]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].split()[:4] == ["broken", "unreadable", "0/6", "?"]


def test_two_flows_do_not_work_on_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = a_run(tmp_path)
    with only_flow(config.run_dir, config.cluster):
        line = complaint(capsys, "run", write(tmp_path))
        assert "run run is already being worked on by process" in line
        assert invoke(["ls"]) == 0
        assert "running" in capsys.readouterr().out


def test_paths_are_bound_to_the_folder_of_the_submission(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = anchor(
        parse_config({"name": "run", "model": {"source": "model"}, "data": {"source": "file", "path": "x.jsonl"}})
    )
    assert config.runs_dir == tmp_path / "runs"
    assert config.model.source == str(tmp_path / "model")
    assert config.data.path == (tmp_path / "x.jsonl",)
    (tmp_path / "x.sqsh").touch()
    (tmp_path / "ubuntu").mkdir()
    address = "docker://$oauthtoken@nvcr.io#nvidia/pytorch:26.01-py3"
    for image, bound in (
        ("x.sqsh", str(tmp_path / "x.sqsh")),
        ("ubuntu", "ubuntu"),
        (address, address),
        ("y" * 300,) * 2,
    ):
        cluster = {"backend": "slurm", "container": {"kind": "pyxis", "image": image}}
        container = anchor(parse_config({"name": "run", "cluster": cluster})).cluster.container
        assert container is not None and container.image == bound
    drafting = {"method": "draft_model", "draft_model": "small"}
    sets = {"aime": {"path": "aime.jsonl", "reward": "exact_match"}, "held-out": {}}
    config = anchor(parse_config({"name": "run", "speculation": drafting, "validate": {"sets": sets}}))
    assert config.validate_.sets["aime"].path == (tmp_path / "aime.jsonl",)
    assert config.validate_.sets["held-out"].path is None
    assert config.speculation.draft_model == tmp_path / "small"


def test_a_draft_model_must_be_there_and_have_the_policys_vocabulary(tmp_path: Path) -> None:
    def problems(directory: Path) -> list[str]:
        speculation = {"method": "draft_model", "draft_model": str(directory)}
        model = {"source": str(tmp_path / "policy"), "max_length": 256}
        return check_draft_model(parse_config({"name": "run", "model": model, "speculation": speculation}))

    write_model(tmp_path / "policy", ["a", "b"], 2)
    write_model(tmp_path / "small", ["a", "b"], 1)
    write_model(tmp_path / "larger", ["a", "b", "c"], 1)
    write_model(tmp_path / "other", ["b", "a"], 1)
    assert problems(tmp_path / "small") == []
    assert "does not exist" in problems(tmp_path / "missing")[0]
    assert "(3 tokens) is not the policy's (2)" in problems(tmp_path / "larger")[0]
    assert "vocabulary" in problems(tmp_path / "other")[0]


def write_model(directory: Path, vocabulary: list[str], num_layers: int, **changes: object) -> None:
    """A model whose weights are all 0, and a tokenizer with one token for each word."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    Tokenizer(WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=vocabulary[0])).save(
        str(directory / "tokenizer.json")
    )
    weights = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    save_file(weights, directory / "model.safetensors")


def test_a_server_that_answers_is_accepted_and_one_that_refuses_or_fails_is_not(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    Thread(target=server.serve_forever, daemon=True).start()
    uri = f"http://127.0.0.1:{server.server_port}"
    assert check_tracking(parse_config({"name": "run", "tracking": {"uri": uri}})) == []
    [found] = check_tracking(parse_config({"name": "run", "tracking": {"uri": f"{uri}/locked"}}))
    assert found.startswith(f"tracking.uri = {uri}/locked: MLflow refuses what it is asked (401)")
    [found] = check_tracking(parse_config({"name": "run", "tracking": {"uri": f"{uri}/broken"}}))
    assert found.startswith(f"tracking.uri = {uri}/broken: no MLflow server answers") and "500" in found
    server.shutdown()
    server.server_close()


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answers = self.path.startswith("/api/")
        self.send_response(200 if answers else 401 if self.path.startswith("/locked/") else 500)
        self.end_headers()
        self.wfile.write(b"{}" if answers else b"")

    def log_message(self, format: str, *args: object) -> None:
        return


def test_disk_is_looked_at_where_the_runs_will_lie(tmp_path: Path) -> None:
    config = parse_config({"name": "run", "model": {"source": "tiny"}, "runs_dir": str(tmp_path / "a" / "b")})
    assert check_disk(config) == []


def test_what_a_run_has_on_disk_already_needs_no_room_again(tmp_path: Path) -> None:
    config = parse_config({"name": "run", "model": {"source": "tiny"}, "runs_dir": str(tmp_path)})
    each = MASTER_AND_MOMENTS * model_shape(config.model).parameters
    too_many = (shutil.disk_usage(tmp_path).free + 20 * GIB) // each
    config = change_config(config, [f"train.keep_checkpoints={too_many}"])
    (line,) = check_disk(config)
    assert "too little free disk" in line
    config.run_dir.mkdir()
    with (config.run_dir / "file").open("w") as file:
        file.truncate(40 * GIB)
    assert check_disk(config) == []


def test_a_snapshot_holds_the_sources_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / "checkout" / package)
    (tmp_path / "checkout" / "specrl" / "loop.py").chmod(0o664)
    (tmp_path / "checkout" / "slurm").chmod(0o777)
    monkeypatch.setattr(environment, "ROOT", tmp_path / "checkout")
    code = snapshot_code(tmp_path)
    assert not [path for path in [code, *code.rglob("*")] if path.stat().st_mode & 0o022]
    assert (code / "specrl" / "loop.py").is_file()
    assert (code / "slurm" / "entry.py").is_file()
    assert not list(code.rglob("__pycache__"))
    assert snapshot_code(tmp_path) == code
    assert len(list(code.parent.iterdir())) == 1


def test_the_last_error_of_a_traceback_is_one_line() -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\nValueError: first\nsecond\n'
    assert last_error(trace) == "ValueError: first second"
    assert last_error("Killed") == "Killed"
    assert last_error("".join(f"[rank0]: {line}" for line in trace.splitlines(keepends=True))) == last_error(trace)


def test_modules_of_the_user_that_are_called_as_ours_are_not_imported(tmp_path: Path) -> None:
    for name in ("flows", "tasks", "slurm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user's')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-P", "-c", "import specrl; specrl.main()", "--version"]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert said.stdout.startswith("specrl ") and said.stderr == ""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"specrl": "specrl:main"}


def test_importing_the_flows_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys, flows.cli, flows.pipeline, flows.commands.run, slurm.entry, specrl.tracking.runs\n"
        "print([name for name in ('torch', 'vllm', 'mlflow', 'transformers', 'megatron') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.num_steps=9", "differs: train.num_steps = 8 -> 9. Continue it as it was started: specrl resume run"),
        ("cluster.partition='gpu'", 'differs: cluster.partition = null -> "gpu"'),
    ],
)
def test_a_folder_with_another_run_is_refused(
    override: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(Path(write(tmp_path)), None, None)
    begin(config)
    before = {path: path.read_bytes() for path in config.run_dir.rglob("*.json")}
    assert words in complaint(capsys, "run", write(tmp_path), "--set", override)
    assert {path: path.read_bytes() for path in config.run_dir.rglob("*.json")} == before


def test_a_data_file_that_was_edited_makes_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(2000)]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = write(tmp_path, '[data]\nsource = "file"\npath = "data.jsonl"\nreward = "exact_match"\n')
    begin(load(Path(path), None, None))
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[1:]))
    assert "names a file that has changed" in complaint(capsys, "run", path)


def other_code(run_dir: Path) -> None:
    """Make the run one of other code, whose command line says so."""
    record = read_record(run_dir)
    assert record is not None
    code = record.code_dir(run_dir)
    for name in ("flows/execute.py", "specrl/loop.py"):
        with (code / name).open("a") as file:
            file.write('print("the other code")\n' if name.startswith("flows") else "# edited\n")
    other = code.rename(code.with_name(sources_digest(code, names(code))))
    write_record(run_dir, record.model_copy(update={"code": other.name}))


def names(code: Path) -> list[str]:
    return [str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()]


def test_a_run_goes_on_with_its_own_code_unless_it_is_told_to_change(tmp_path: Path) -> None:
    config = load(Path(write(tmp_path)), None, None)
    record = begin(config)
    write_config(config)
    other_code(config.run_dir)

    def resume(*arguments: str) -> str:
        command = [sys.executable, "-m", "flows.cli", "resume", str(config.run_dir), "--dry-run", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    as_started = resume("--steps", "9")
    assert "the other code" in as_started
    assert "train.num_steps = 8 -> 9" in as_started
    changed = resume("--new-code")
    assert "the other code" not in changed
    assert f"stages that have not finished run the present code, {record.code}" in changed
    assert "specrl: " not in as_started + changed
    shutil.rmtree(config.run_dir / "code")
    assert "the code that it was started with, is gone" in resume()


def test_a_change_may_leave_a_setting_without_an_effect_but_not_set_one(tmp_path: Path) -> None:
    config = load(Path(write(tmp_path, "[speculation]\nk = 2\n[train]\nkeep_every = 6\n")), None, None)
    begin(config)
    write_config(config)

    def change(*overrides: str) -> None:
        change_run(config.run_dir, overrides, Console(quiet=True), dry_run=True)

    change("speculation.method='replay'")
    with pytest.raises(ConfigError, match=r'^speculation\.k = 1 with speculation\.method = "replay": it drafts'):
        change("speculation.method='replay'", "speculation.k=1")
    with pytest.raises(ConfigError, match=r"^train\.keep_every = 6 with train\.checkpoint_every = 4: "):
        change("train.checkpoint_every=4")


def test_a_scheduled_run_goes_on_with_its_own_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = load(Path(write(tmp_path)), None, None)
    record = begin(config)
    write_config(config)
    lost = {**record.settings, "model": {**record.settings["model"], "source": str(tmp_path / "nowhere")}}
    write_record(config.run_dir, record.model_copy(update={"settings": lost}))
    other_code(config.run_dir)
    with pytest.raises(JobError, match=f"specrl resume {config.run_dir} failed with exit code 2"):
        resume_in_process(config.run_dir)
    output, errors = capfd.readouterr()
    assert "the other code" in output
    assert errors == f"specrl: model directory {tmp_path}/nowhere does not exist\n"


def test_a_damaged_record_is_not_said_to_be_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(Path(write(tmp_path)), None, None)
    begin(config)
    write_config(config)
    (config.run_dir / "run.json").write_text('{"settings": {"na')
    for words in (["sync", "run"], ["resume", "run"]):
        assert "run.json is damaged: it names no copy of the code; specrl rm run removes" in complaint(capsys, *words)


@pytest.mark.parametrize("command", ["stop", "rm"])
def test_a_run_with_settings_of_another_version_is_ended_without_its_code(tmp_path: Path, command: str) -> None:
    config = load(Path(write(tmp_path)), None, None)
    record = begin(config)
    write_config(config)
    write_record(config.run_dir, record.model_copy(update={"settings": {**record.settings, "unheard_of": 1}}))
    other_code(config.run_dir)
    words = [sys.executable, "-m", "flows.cli", command, "run", *(["--yes"] if command == "rm" else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the other code" not in done.stdout
    assert (config.run_dir / "stop").exists() if command == "stop" else not config.run_dir.exists()


@pytest.mark.parametrize("command", ["stop", "rm"])
def test_a_scheduler_that_does_not_answer_is_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(Path(write(tmp_path)), "slurm", None)
    begin(config)
    write_config(config)
    (config.run_dir / "jobs" / "prepare-0").mkdir(parents=True)
    (tmp_path / "squeue").write_text("#!/bin/sh\necho squeue: error: Unable to contact slurm controller >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(submit, "SILENCE_SECONDS", 0)
    monkeypatch.setattr(submit, "RETRY_SECONDS", 0)
    assert invoke([command, "run", *(["--yes"] if command == "rm" else [])]) == 1
    assert capsys.readouterr().err == "specrl: squeue: Unable to contact slurm controller\n"
    assert config.run_dir.is_dir()


def test_a_run_starts_from_a_checkpoint_that_another_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(Path(write(tmp_path)), None, None)
    write_config(config)
    new = ["run", write(tmp_path), "--set", "name=new"]
    assert "no run nobody" in complaint(capsys, *new, "--from", "nobody")
    assert "the run has not started" in complaint(capsys, *new, "--from", "run")
    record = begin(config)
    stages = config.run_dir / "stages"
    assert "the run has no checkpoint yet" in complaint(capsys, *new, "--from", "run")
    write_model(stages / record.stage_keys["prepare"] / "policy", ["a"], 1)
    write_model(stages / record.stage_keys["pretrain"] / "drafter", ["a"], 1)
    for step in (2, 4):
        (stages / record.stage_keys["train"] / "checkpoints" / f"step={step:06d}").mkdir(parents=True)
        (stages / record.stage_keys["train"] / "checkpoints" / f"step={step:06d}" / "manifest.json").write_text("{}")
    assert "checkpoints after these steps: 2, 4" in complaint(capsys, *new, "--from", "run@3")
    adapted = complaint(capsys, *new, "--set", "policy.lora.rank=4", "--from", "run@2")
    assert "the new one needs a policy: specrl export run@2 --format policy" in adapted

    other = config.model_copy(update={"name": "new"})
    changed, origin = start_from("run@2", other)
    assert origin is not None
    assert (origin.start.step, origin.start.has_drafter) == (2, True)
    assert changed.warm_start.num_examples == 0
    origin.link(other.run_dir)
    started = begin(own_source(other), origin.start)
    assert (other.run_dir / "origin" / "checkpoints" / "step=000002" / "manifest.json").is_file()
    assert (other.run_dir / "origin" / "drafter" / "config.json").is_file()
    newest = start_from("run", other)[1]
    assert newest is not None
    assert newest.start.step == 4
    keys = begin(own_source(other), newest.start).stage_keys
    assert all(keys[stage] != started.stage_keys[stage] for stage in keys)
    policy, nothing = start_from(str(other.run_dir / "origin" / "policy"), other)
    assert nothing is None
    assert Path(policy.model.source).name == "policy"


def test_a_run_that_was_killed_while_it_began_from_another_is_not_resumed_without_it(tmp_path: Path) -> None:
    config = load(Path(write(tmp_path)), None, None)
    checkpoint = tmp_path / "other" / "step=000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    start = Continuation(run="other", key="train-0", step=2, stage_dir=ORIGIN, counts_on=False)
    origin = Origin(start, checkpoint, tmp_path / "policy", tmp_path / "drafter")
    origin.link(config.run_dir)
    with pytest.raises(ConfigError, match=r"run run was interrupted while it began; .*specrl run CONFIG --from"):
        begin_run(config, None)
    assert read_record(config.run_dir) is None
    begin_run(config, origin)
    record = read_record(config.run_dir)
    assert record is not None
    assert record.continues == start


def test_other_code_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(Path(write(tmp_path)), None, None)
    begin(config)
    other_code(config.run_dir)
    assert "differs: other code. Continue" in complaint(capsys, "run", write(tmp_path))


def a_run(folder: Path) -> Config:
    config = anchor(parse_config({"name": "run", "model": {"source": "tiny"}, "runs_dir": str(folder / "runs")}))
    write_config(config)
    return config


def test_a_prefect_server_that_ends_under_a_flow_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:9/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    with pytest.raises(ServerError, match=r"does not answer any more .*specrl resume"), PrefectServer(tmp_path):
        httpx.get(url)


def test_a_standard_stream_that_is_closed_hides_no_exit_code(tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m flows.cli show nope --runs-dir {tmp_path}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for closed in ("2>&-", "<&- >&- 2>&-"):
        assert subprocess.run(f"{command} {closed}", shell=True, env=environment, check=False).returncode == 2


def test_a_terminal_without_a_width_and_a_folder_that_is_gone_are_no_silence(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    command = f"rmdir ../here; {sys.executable} -m flows.cli"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "0"}

    def called(words: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "here").mkdir(exist_ok=True)
        shell = ["sh", "-c", f"{command} {words}"]
        return subprocess.run(
            shell, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, check=False
        )

    assert called(f"ls --runs-dir {tmp_path}").stdout.startswith(f"no runs in {tmp_path}")
    gone = called(f"run {ROOT}/configs/smoke.toml --dry-run")
    assert (gone.returncode, gone.stderr) == (
        1,
        "specrl: the current folder has been removed; change to another one\n",
    )


def test_an_error_that_names_no_file_is_not_taken_for_a_folder_that_is_gone() -> None:
    assert (
        cli._said(FileNotFoundError(errno.ENOENT, "No such file or directory"), ["ls"]) == "No such file or directory"
    )


def test_a_run_that_mlflow_knows_is_not_read_to_see_that(tmp_path: Path) -> None:
    config = parse_config({"name": "run", "runs_dir": str(tmp_path), "tracking": {"uri": "http://127.0.0.1:9"}})
    assert len(check_tracking(config)) == 1
    (config.run_dir / "mlflow_run_id").mkdir(parents=True)  # which, as a file of somebody else's, cannot be read
    assert check_tracking(config) == []


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"policy": {"lr_warmup_steps": 20}},
            "policy.lr_warmup_steps = 20 with train.num_steps = 10: the learning rate",
        ),
        ({"policy": {"lr_warmup_steps": 10}}, ""),
        ({"policy": {"lr": 1.0}}, "policy.lr = 1 is far above what RL uses"),
        ({"sampling": {"top_p": 1e-6}}, "sampling.top_p = 1e-06 often leaves a single token"),
        ({"sampling": {"top_p": 0.9}}, ""),
    ],
)
def test_settings_that_hardly_let_anything_be_learned_are_said(
    settings: dict[str, dict[str, float]], line: str
) -> None:
    found = doubts(parse_config({"name": "run", "train": {"num_steps": 10}, **settings}))
    assert [one[: len(line)] for one in found] == ([line] if line else [])
