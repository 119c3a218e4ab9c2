"""Secrets have one place, a private file that only the ranks read; they are refused or left out everywhere else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.cli import EXIT_USAGE, invoke
from flows.folder import write_config
from slurm.backend import JobError
from slurm.commands import describe
from slurm.environment import ROOT, inherited, job_environment, read_environment_file, snapshot_code
from slurm.submit import attach_or_submit
from slurm.watch import wait
from specrl.artifacts import Artifact, write_result
from specrl.config import Config, ConfigError, parse_config
from specrl.config.text import redacted, secret_name
from specrl.context import StageContext
from specrl.lineage.source import source_tags

VALUE = "s3cret-of-this-test"


class Environment(Artifact):
    seconds: float = 0.0


def main(context: StageContext) -> None:
    """Write down what a rank sees, the secret as its length alone."""
    seen = {
        "length": len(os.environ["HF_TOKEN"]),
        "literal": os.environ["LITERAL"],
        "threads": os.environ["OMP_NUM_THREADS"],
        "prefect": sorted(name for name in os.environ if name.startswith("PREFECT_")),
        "path": sys.path,
        "mode": context.stage_dir.stat().st_mode & 0o777,
    }
    (context.stage_dir / "seen.json").write_text(json.dumps(seen))
    write_result(context.stage_dir, Environment())


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    path = tmp_path / "secrets.env"
    path.write_text(f"# for the hub\n\nHF_TOKEN={VALUE}\nLITERAL='$(touch canary)' `id` $HOME\nOMP_NUM_THREADS=77\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def make_context(tmp_path: Path, secrets: Path) -> Callable[[], StageContext]:
    def make() -> StageContext:
        config = parse_config(
            {
                "name": "run",
                "runs_dir": str(tmp_path / "runs"),
                "model": {"source": "tiny"},
                "resources": {"cpus_per_rank": 1, "memory_gib_per_rank": 0.5, "minutes": 5},
                "cluster": {"environment_file": str(secrets)},
            }
        )
        write_config(config)
        return StageContext(config, "prepare", "prepare-0", config.run_dir / "stages" / "prepare-0", {}, "")

    return make


def test_a_rank_has_the_variables_of_the_file_and_nothing_is_recorded(
    make_context: Callable[[], StageContext], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "specrl:password")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    context = make_context()
    job = attach_or_submit(context, "tests.security.test_secrets:main", snapshot_code(context.config.run_dir))
    assert job is not None
    wait(job, context, lambda state, progress: None)
    seen = json.loads((context.stage_dir / "seen.json").read_text())
    assert seen["length"] == len(VALUE)
    assert seen["literal"] == "'$(touch canary)' `id` $HOME"
    assert seen["threads"] == "1"  # what a rank needs itself stands
    assert seen["prefect"] == []
    assert str(tmp_path / "elsewhere") not in seen["path"]
    written = [path for path in context.run_dir.rglob("*") if path.is_file()]
    assert len(written) > 3
    assert not [path for path in written if VALUE.encode() in path.read_bytes()]


def test_a_file_that_is_open_to_others_ends_the_job_with_one_line(
    make_context: Callable[[], StageContext], secrets: Path
) -> None:
    secrets.chmod(0o640)
    context = make_context()
    job = attach_or_submit(context, "tests.security.test_secrets:main", snapshot_code(context.config.run_dir))
    assert job is not None
    with pytest.raises(JobError) as failed:
        wait(job, context, lambda state, progress: None)
    assert len(str(failed.value).splitlines()) == 1
    assert f"cluster.environment_file = '{secrets}' is open to others (mode 640): run chmod 600" in str(failed.value)
    assert not (context.stage_dir / "seen.json").exists()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_only_a_private_file_is_read(secrets: Path, mode: int) -> None:
    assert read_environment_file(secrets)["HF_TOKEN"] == VALUE
    secrets.chmod(mode)
    with pytest.raises(ConfigError, match=f"is open to others .mode {mode:o}.: run chmod 600"):
        read_environment_file(secrets)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_file_of_somebody_else_is_refused(secrets: Path) -> None:
    os.chown(secrets, 65534, -1)
    with pytest.raises(ConfigError, match="belongs to user 65534: it must be your own"):
        read_environment_file(secrets)


@pytest.mark.parametrize(
    "line",
    [
        f"export HF_TOKEN={VALUE}",
        f"HF_TOKEN: {VALUE}",
        VALUE,
        f"HF TOKEN={VALUE}",
        f"A=$(id)\nB-C={VALUE}",
        f"={VALUE}",
        f"A={VALUE}\r",
        f"A={VALUE}\x1b[2J",
        f"A={VALUE}\x00",
    ],
)
def test_a_line_that_sets_no_variable_is_named_by_its_number_and_not_quoted(secrets: Path, line: str) -> None:
    secrets.write_bytes(line.encode())
    with pytest.raises(ConfigError, match=r"line [12] must be NAME=VALUE") as refused:
        read_environment_file(secrets)
    assert VALUE not in str(refused.value)
    assert str(refused.value).isprintable()


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, reason in (("pipe", "must be a file"), ("", "Is a directory"), ("none", "cannot be read on .*No such")):
        with pytest.raises(ConfigError, match=reason) as refused:
            read_environment_file(tmp_path / name)
        assert len(str(refused.value).splitlines()) == 1


def test_a_missing_file_is_one_line_before_anything_is_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = str(ROOT / "configs" / "smoke.toml")
    arguments = ["run", quick, "--dry-run", "--set", "runs_dir=runs", "--set", "cluster.environment_file=secrets.env"]
    assert invoke(arguments) == EXIT_USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"specrl: cluster.environment_file = '{tmp_path}/secrets.env' cannot be read on ")
    assert len(said.splitlines()) == 1


def test_a_container_sees_the_file(secrets: Path, tmp_path: Path) -> None:
    cluster = {"environment_file": str(secrets), "container": {"kind": "apptainer", "image": "image.sif"}}
    config = parse_config({"name": "run", "runs_dir": str(tmp_path), "cluster": cluster})
    assert f"{secrets}:{secrets}" in describe(config, "train")


SECRETS = (
    f"export XYZ_TOKEN={VALUE}",
    f'export WANDB_API_KEY="{VALUE}"',
    f"export AWS_SECRET_ACCESS_KEY='{VALUE}'",
    f"MY_SECRET={VALUE} program",
    f"export PGPASSWORD={VALUE}",
    f"export DB_PASSWORD={VALUE}",
    f"declare -x API_KEY={VALUE}",
    f"module load x; export SOME_KEY={VALUE}",
    "huggingface-cli download x --revision hf_abcdefghijklmnop",
    "curl -H 'X: sk-proj-abcdefghijklmnop'",
    "echo AKIAIOSFODNN7EXAMPLE",
    f"git clone https://user:{VALUE}@example.org/x",
    f"git clone https://{VALUE}@example.org/x",
    f"wandb login --token {VALUE}",
    f"mysql --password={VALUE}",
    f"curl -H 'Authorization: Bearer {VALUE}' x",
    f"curl -s -u user:{VALUE} x",
    f"export XYZ_TOKEN=$'{VALUE}'",
    f"export XYZ_TOKEN=${{XYZ_TOKEN:-{VALUE}}}",
    f"export XYZ_TOKEN+={VALUE}",
    f"setenv XYZ_TOKEN {VALUE}",
    f"aws configure set aws_secret_access_key {VALUE}",
    f"export SSHPASS={VALUE}",
    f"echo machine example.org login user password {VALUE} > ~/.netrc",
    "wandb login --relogin 0123456789abcdefghijklmnop",
)
HARMLESS = (
    "module load cuda/13",
    "export NCCL_DEBUG=INFO",
    "export TOKENIZERS_PARALLELISM=false",
    "export VLLM_MAX_NUM_BATCHED_TOKENS=8192",
    "export HF_TOKEN=$(cat ~/.token)",
    'export HF_TOKEN="$MY_TOKEN"',
    "export WANDB_API_KEY=",
    "unset HF_TOKEN",
    "export NCCL_IB_PKEY=0x8001",
    "pip install hf_transfer",
    "git clone git@example.org:x/y; git clone ssh://git@example.org/x",
    "export http_proxy=http://proxy.example.org:3128",
    "cd task-sk-learn-experiments",
    "cd /scratch/hf_checkpoints/sk-learn-experiments",
    "export PWD=/scratch",
    "export GOOGLE_APPLICATION_CREDENTIALS=/home/me/gcp.json",
    "export MASTER_KEY=~/.ssh/master.pem; export OLD_PWD='/scratch/me'",
    "export HF_HUB_DISABLE_IMPLICIT_TOKEN=1 PAD_TOKEN=0 MAX_TOKEN=4096 IS_KEY=true",
    'export HF_TOKEN="${HF_TOKEN:-}"',
    "docker run -u 1000:1000 image; set -o pipefail; source ~/.secrets/token.sh",
)


@pytest.mark.parametrize("line", SECRETS)
def test_a_secret_in_a_setup_line_is_refused_with_advice_and_not_repeated(line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"name": "run", "cluster": {"setup": ["module load x", line]}})
    [said] = str(refused.value).splitlines()
    assert said.startswith("cluster.setup.1")
    assert "looks like a secret" in said
    assert "cluster.environment_file" in said
    for value in (VALUE, "abcdefghijklmnop", "AKIAIOSFODNN7EXAMPLE"):
        assert value not in said


@pytest.mark.parametrize("line", HARMLESS)
def test_other_setup_lines_are_taken(line: str) -> None:
    assert parse_config({"name": "run", "cluster": {"setup": [line]}}).cluster.setup == (line,)
    assert secret_name(line) is None
    assert redacted(line) == line


def test_a_secret_is_refused_in_every_other_setting_by_its_form() -> None:
    given: list[dict[str, Any]] = [
        {"model": {"source": "hf_abcdefghijklmnop"}},
        {"data": {"generators": [{"name": "worked_sums", "parameters": {"key": "sk-abcdefghijklmnop"}}]}},
        {"cluster": {"sbatch": {"comment": "AKIAIOSFODNN7EXAMPLE"}}},
    ]
    for data in given:
        with pytest.raises(ConfigError, match=r"looks like a secret, .*cluster.environment_file") as refused:
            parse_config({"name": "run", **data})
        assert "abcdefghijklmnop" not in str(refused.value)


def test_a_secret_in_a_value_of_another_kind_is_not_repeated() -> None:
    for value in (f"export HF_TOKEN={VALUE}", {"a": f"export HF_TOKEN={VALUE}"}):
        with pytest.raises(ConfigError, match=r"^cluster\.setup = .*HF_TOKEN=\*\*\*") as refused:
            parse_config({"name": "run", "cluster": {"setup": value}})
        assert VALUE not in str(refused.value)


def test_the_recorded_command_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "run",
        "c.toml",
        "--set",
        f"data.api_key={VALUE}",
        "--set=model.source=hf_abcdefghijklmnop",
        "--set",
        "seed=3",
    ]
    monkeypatch.setattr(sys, "argv", ["/bin/specrl", *words])
    command = source_tags(Config(name="run", runs_dir=tmp_path))["mlflow.source.name"]
    assert command == "specrl run c.toml --set 'data.api_key=***' '--set=model.source=***' --set seed=3"


def test_the_present_folder_is_importable_in_a_job_only_where_functions_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code = tmp_path / "code"

    def places(**sections: Any) -> list[str]:
        config = parse_config({"name": "run", **sections})
        return job_environment(code, config)["PYTHONPATH"].split(os.pathsep)

    assert places() == [str(code)]
    assert job_environment(code)["PYTHONPATH"] == str(code)
    own: list[dict[str, Any]] = [
        {"data": {"reward": "my:reward"}},
        {"train": {"loss": "my:loss"}},
        {"train": {"advantage": "my:advantage"}},
        {"train": {"correction": "my:correction"}},
        {"drafter": {"loss": "my:loss"}},
        {"cluster": {"backend": "my:Scheduler"}},
        {"stage_resources": {"train": {"backend": "my:Scheduler"}}},
        {"validate": {"sets": {"mine": {"reward": "my:reward"}}}},
    ]
    for sections in own:
        assert places(**sections) == [str(code), str(tmp_path)]


def test_prefects_password_does_not_go_to_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "specrl:password")
    monkeypatch.setenv("HOME_OF_MINE", "x")
    assert "PREFECT_API_AUTH_STRING" not in inherited()
    assert inherited()["HOME_OF_MINE"] == "x"
    assert os.environ["PREFECT_API_AUTH_STRING"] == "specrl:password"
