"""A run touches what is its own: what it reads, sends, removes and writes lies in its folder."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from flows.cli import invoke
from flows.preflight import check_folder
from specrl.config import Config, parse_config
from specrl.context import StageContext
from specrl.lineage.record import Continuation
from specrl.processes import is_locked
from specrl.report.results import find_stages, is_run, readable_config
from specrl.report.samples import COLUMNS
from specrl.schemas import ROLLOUT_SCHEMA
from specrl.tracking.log import Log
from specrl.tracking.runs import stage_folders
from tests.security.hostile import NOBODY, Attacked, attacked, edit, in_fork, specrl

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to somebody else")
SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that other users may enter, as they may not enter pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that is not the run's."""
    (tmp_path / "secret").mkdir()
    path = tmp_path / "secret" / "id_rsa"
    path.write_text(f"{SECRET}\n")
    return path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] or b"{")


def nest(path: Path) -> None:
    path.write_text("[" * 200_000)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def alien(path: Path) -> None:
    path.write_text('["of", "another", {"kind": NaN}]\n')


def wrong_types(path: Path) -> None:
    nothing = {"time": "x", "step": [], "number": {}, "seconds": "many", "updated_at": [], "job_id": {}, "metrics": 3}
    path.write_text(json.dumps({**nothing, "code": 1, "settings": [], "stage_keys": {"train": "../../x"}}) + "\n")


def infinite(path: Path) -> None:
    numbers = ("time", "done", "total", "started_at", "started_done", "updated_at", "seconds", "number")
    values = dict.fromkeys(numbers, 1e308) | {"step": None, "kind": "x", "text": "x", "message": "x", "unit": "x"}
    path.write_text(json.dumps(values).replace("1e+308", "1e999") + "\n")


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00" * 10)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def enormous(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = [
    "config.json",
    "run.json",
    "summary.json",
    ".flow.lock",
    ".flow.holder",
    "jobs/*/context.json",
    "jobs/*.json",
    "stages/prepare-*/result.json",
    "stages/prepare-*/policy/tokenizer.json",
    "stages/train-*/progress.json",
    "stages/train-*/events.jsonl",
    "stages/train-*/segments.jsonl",
    "stages/train-*/steps/step=000000.json",
    "stages/train-*/validation/step=000000.json",
    "stages/train-*/tracking/sent-mlflow.json",
    "stages/train-*/rollouts/step=000000/rank=0000.arrow",
]
HURT = [truncate, nest, empty, alien, wrong_types, infinite, not_text, pipe, endless, enormous, folder]


def look_everywhere(run: Attacked) -> int:
    """Call all commands that look at runs, and return the largest exit code."""
    runs = ["--runs-dir", str(run.config.runs_dir)]
    assert invoke(["ls", *runs]) == 0
    return max(invoke([*words, *runs]) for words in (["show", "run"], ["watch", "run", "--once"], ["samples", "run"]))


@pytest.mark.parametrize("hurt", HURT)
@pytest.mark.parametrize("own", [True, pytest.param(False, marks=as_root)], ids=["own", "foreign"])
def test_no_file_of_a_run_stops_those_who_look_at_runs(hurt: Callable[[Path], None], own: bool, tmp_path: Path) -> None:
    run = attacked(tmp_path)
    for pattern in FILES:
        (path,) = run.run_dir.glob(pattern)
        kept = path.read_bytes()
        hurt(path)
        if not own:
            run.give_to(NOBODY)
        ended = in_fork(lambda: look_everywhere(run))
        assert ended.code in (0, 2), (pattern, ended)
        assert "Traceback" not in ended.text
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(kept)
    assert not run.marker.exists()


def test_stray_folders_break_no_list(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    for name, config in {"hfmodel": '{"model_type": "llama"}', "short": '{"name": "x", ', "empty": ""}.items():
        (run.config.runs_dir / name).mkdir()
        (run.config.runs_dir / name / "config.json").write_text(config)
        assert not is_run(run.config.runs_dir / name)
    (run.config.runs_dir / "dangling").symlink_to("nowhere")
    ended = specrl("ls", "--runs-dir", str(run.config.runs_dir))
    assert ended.code == 0, ended.text
    assert len(ended.text.strip().splitlines()) == 3
    ended = specrl("rm", "hfmodel", "--yes", "--runs-dir", str(run.config.runs_dir))
    assert (ended.code, ended.text) == (2, f"specrl: no run hfmodel in {run.config.runs_dir}; its runs: run\n")


def test_texts_of_a_run_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    escape = "\x1b]0;owned\x07\x1b[2J\u202e\x9b"
    train = run.stage("train")
    (train / "events.jsonl").write_text(json.dumps({"time": 1.0, "step": 0, "kind": "restart", "text": escape}) + "\n")
    progress = {"done": 1, "total": 2, "message": escape, "unit": escape}
    progress |= {"started_at": 1.0, "started_done": 0, "updated_at": 2.0}
    (train / "progress.json").write_text(json.dumps(progress))
    edit(run.run_dir / "config.json", model={"source": escape})
    renamed = run.config.runs_dir / "\x1b[31mred"
    run.run_dir.rename(renamed)
    for command in (["ls"], ["show", renamed.name], ["watch", renamed.name, "--once"], ["show", escape]):
        ended = specrl(*command, "--runs-dir", str(run.config.runs_dir))
        assert "Traceback" not in ended.text
        assert "x1b" in ended.text
        assert not set("\x1b\x07\x9b\u202e") & set(ended.text)


def test_a_lock_that_is_a_link_leaves_what_it_points_to(tmp_path: Path, secret: Path) -> None:
    run = attacked(tmp_path)
    lock = run.run_dir / ".flow.lock"
    lock.unlink()
    lock.symlink_to(secret)
    assert not is_locked(lock)
    specrl("ls", "--runs-dir", str(run.config.runs_dir))
    specrl("watch", "run", "--once", "--runs-dir", str(run.config.runs_dir))
    assert secret.read_text() == f"{SECRET}\n"


def test_links_are_not_followed_by_those_who_look(tmp_path: Path, secret: Path) -> None:
    run = attacked(tmp_path)
    train = run.stage("train")
    event = {"time": 1.0, "step": 0, "kind": "restart", "text": SECRET}
    (secret.parent / "events.jsonl").write_text(json.dumps(event) + "\n")
    (train / "events.jsonl").unlink()
    (train / "events.jsonl").symlink_to(secret.parent / "events.jsonl")
    assert SECRET not in specrl("watch", str(run.run_dir), "--once").text
    (run.run_dir / "stages").rename(secret.parent / "stages")
    (run.run_dir / "stages").symlink_to(secret.parent / "stages")
    ended = specrl("samples", str(run.run_dir))
    assert (ended.code, ended.text) == (2, "specrl: run run has no rollouts yet\n")


def test_rollouts_with_wrong_offsets_are_one_line(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    (path,) = run.stage("train").glob("rollouts/step=000000/*.arrow")
    schema = pa.schema([ROLLOUT_SCHEMA.field(name) for name in COLUMNS])
    values = {"response": "x" * 12345, "answer": "", "finish_reason": "", "prompt_tokens": [1], "response_tokens": [1]}
    table = pa.Table.from_pylist([{**dict.fromkeys(COLUMNS, 0), **values, "turns": [], "reward_parts": None}], schema)
    with pa.ipc.new_file(str(path), schema) as writer:
        writer.write_table(table)
    assert "x" * 12345 in specrl("samples", str(run.run_dir)).text
    before, offsets, after = path.read_bytes().rpartition(struct.pack("<2i", 0, 12345))
    assert offsets
    path.write_bytes(before + struct.pack("<2i", 0, 2_000_000_000) + after)
    ended = specrl("samples", str(run.run_dir))
    assert ended.code == 2, ended.text
    (line,) = ended.text.splitlines()
    assert "holds no rollouts" in line


def test_settings_that_are_not_understood_have_their_defaults_and_import_nothing(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(run.marker)!r}, 'w')\n")
    settings = json.loads((run.run_dir / "run.json").read_text())["settings"]
    settings["train"] |= {"num_steps": 77, "loss": {"name": "evil:loss"}, "unheard_of": 1}
    settings["cluster"] |= {"backend": "evil:Scheduler", "access": "everybody"}
    edit(run.run_dir / "run.json", settings=settings)
    config = readable_config(run.run_dir)
    assert (config.train.num_steps, config.cluster.access) == (77, "owner")
    run.run_dir.chmod(0o777)
    ended = specrl("watch", str(run.run_dir), "--once", folder=tmp_path)
    assert ended.code == 0, ended.text
    assert not run.marker.exists()


def entry(run: Attacked, kind: str, **values: object) -> None:
    Log(run.run_dir).append(kind, **values)


OUTSIDE = ["../../secret/id_rsa", "stages/../../../secret/id_rsa", "link/id_rsa", "file", "folder", "..", "", "."]


def test_sync_uploads_nothing_from_outside_of_the_run(tmp_path: Path, secret: Path) -> None:
    run = attacked(tmp_path)
    entry(run, "start", name="run", tags={}, parent=None)
    (run.run_dir / "link").symlink_to(secret.parent)
    (run.run_dir / "file").symlink_to(secret)
    (run.run_dir / "folder").mkdir()
    (run.run_dir / "folder" / "file").symlink_to(secret)
    for path in (*OUTSIDE, str(secret)):
        entry(run, "artifact", path=path, folder=None)
    entry(run, "model", path=OUTSIDE[0], folder="stolen", without="", name="stolen", tags={})
    entry(run, "dataset", source=str(secret), name="stolen", context="training")
    stages = run.run_dir / "stages" / "linked-0"
    stages.symlink_to(secret.parent)
    Log(secret.parent).append("artifact", path="id_rsa", folder=None)
    ended = specrl("sync", "run", "--runs-dir", str(run.config.runs_dir), folder=tmp_path)
    assert ended.code == 0, ended.text
    assert secret.read_text() == f"{SECRET}\n"
    assert stages not in stage_folders(run.run_dir)
    assert not (secret.parent / "tracking" / "sent-mlflow.json").exists()
    sent = (path for path in (run.config.runs_dir / "mlartifacts").rglob("*") if path.is_file())
    assert not [path for path in sent if SECRET in path.read_text()]


@pytest.mark.parametrize("linked", ["stages", "stages/train", "checkpoints", "rollouts"])
def test_rm_removes_links_and_nothing_that_they_point_to(linked: str, tmp_path: Path) -> None:
    run = attacked(tmp_path)
    train = run.stage("train")
    (train / "checkpoints" / "step=000002").mkdir(parents=True)
    (train / "checkpoints" / "step=000002" / "manifest.json").write_text("{}")
    place = {"stages": run.run_dir / "stages", "stages/train": train}.get(linked, train / linked)
    outside = tmp_path / "outside"
    place.rename(outside)
    place.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    continues = {"run": "run", "key": train.name, "step": 2, "stage_dir": f"stages/{train.name}", "counts_on": True}
    edit(run.run_dir / "run.json", continues=continues)
    ended = specrl("rm", "run", "--yes", "--runs-dir", str(run.config.runs_dir))
    assert ended.code == 0, ended.text
    assert sorted(outside.rglob("*")) == before
    assert not run.run_dir.exists()


@pytest.mark.parametrize("name", ["run.json", "config.json"])
def test_a_run_whose_record_is_damaged_can_be_removed(name: str, tmp_path: Path) -> None:
    run = attacked(tmp_path)
    (run.run_dir / name).write_text("{")
    assert specrl("rm", "run", "--yes", "--runs-dir", str(run.config.runs_dir)).code == 0
    assert not run.run_dir.exists()


def configured(tmp_path: Path, **values: object) -> str:
    path = tmp_path / "run.toml"
    path.write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        + '[model]\nsource = "tiny"\n[drafter]\ndraft_vocab_size = 64\n'
    )
    return str(path)


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_a_run_does_not_write_into_the_folder_of_a_model(words: list[str], tmp_path: Path) -> None:
    model = tmp_path / "models" / "qwen"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    path = configured(tmp_path, name="qwen", runs_dir=str(model.parent))
    ended = specrl("run", path, *words, folder=tmp_path)
    assert ended.code == 2, ended.text
    assert f"specrl: {model} is not this run's: it has config.json; " in ended.text
    assert {path.name: path.read_text() for path in model.iterdir()} == {"config.json": '{"model_type": "qwen3"}'}
    assert [path.name for path in model.parent.iterdir()] == ["qwen"]


def test_a_run_begins_in_a_folder_that_is_absent_empty_or_its_own(tmp_path: Path) -> None:
    config = parse_config({"name": "run", "runs_dir": str(tmp_path)})
    assert check_folder(config) == []
    config.run_dir.mkdir(mode=0o700)
    assert check_folder(config) == []
    (config.run_dir / ".flow.lock").touch(mode=0o600)  # of a call that was killed
    (config.run_dir / "code").mkdir(mode=0o700)
    assert check_folder(config) == []
    (config.run_dir / "thesis.tex").touch(mode=0o600)
    assert "it has thesis.tex" in check_folder(config)[0]
    run = attacked(tmp_path)
    assert check_folder(run.config) == []
    (tmp_path / "file").touch()
    assert "is not this run's" in check_folder(config.model_copy(update={"name": "file"}))[0]


@pytest.mark.parametrize(
    "name", ["mlflow.db", "mlartifacts", "MLflow.db", "mlflow.db-wal", "x" * 129, ".prefect", "a/b"]
)
def test_a_name_that_is_taken_or_too_long_is_refused(name: str, tmp_path: Path) -> None:
    ended = specrl("run", configured(tmp_path, name=name), "--dry-run", folder=tmp_path)
    assert ended.code == 2, ended.text
    (line,) = ended.text.splitlines()
    assert line.startswith("specrl: name")
    assert Config(name="x" * 128).name


@pytest.mark.parametrize("key", ["../../x", "/x", "a/b"])
def test_a_record_names_no_stage_outside_of_its_run(key: str, tmp_path: Path) -> None:
    run = attacked(tmp_path)
    edit(run.run_dir / "run.json", stage_keys={**run.record.stage_keys, "train": key})
    ended = specrl("resume", str(run.run_dir), "--dry-run", "--new-code")
    assert ended.code == 2, ended.text
    assert "is not of this version of specrl" in ended.text
    assert "train" not in find_stages(run.run_dir)


@pytest.mark.parametrize("place", ["stage_dir", "inputs", "continues"])
def test_a_context_leads_nowhere_but_into_its_run(place: str, tmp_path: Path) -> None:
    config = parse_config({"name": "run", "runs_dir": str(tmp_path)})
    stage_dir, path = config.run_dir / "stages" / "train-0", tmp_path / "context.json"
    start = Continuation(run="run", key="train-1", step=1, stage_dir=stage_dir, counts_on=True)
    StageContext(config, "train", "train-0", stage_dir, {"prepare": stage_dir}, "", start).save(path)
    StageContext.load(path).check()
    for outside in (str(tmp_path / "other"), f"{stage_dir}/../../../other", "other"):
        values = {"stage_dir": outside, "inputs": {"prepare": outside}}
        values["continues"] = {**start.model_dump(mode="json"), "stage_dir": outside}
        StageContext(config, "train", "train-0", stage_dir, {"prepare": stage_dir}, "", start).save(path)
        edit(path, **{place: values[place]})
        with pytest.raises(ValueError, match="leads out of"):
            StageContext.load(path).check()
