"""What is said of data files whose columns or contents are not there."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.preflight import check_data, check_folder
from specrl.config import Config, ConfigError
from specrl.data.formats.messages import read_messages
from specrl.data.formats.places import files_of
from specrl.data.formats.rows import find, read_rows


@pytest.mark.parametrize(
    ("key", "column", "there"),
    [
        ("prompt_column", "prompt", "promt"),
        ("prompt_column", "prompt", " Prompt"),
        ("prompt_column", "prompt", "question"),
        ("answer_column", "answer", "ground_truth"),
    ],
)
def test_a_missing_column_is_named_with_the_one_that_was_meant(key: str, column: str, there: str) -> None:
    with pytest.raises(ConfigError, match=f"; perhaps data.{key} = '{there}'"):
        find({"level": 1, there: "x"}, column, "line 1", key)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_a_pointer_of_git_lfs_says_how_to_fetch_the_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ConfigError, match="is a Git LFS pointer: run `git lfs pull`"):
        list(read_rows(tmp_path / name))


def test_a_folder_without_data_and_runs_below_a_file_are_refused(tmp_path: Path) -> None:
    data = {"source": "file", "path": str(tmp_path), "reward": "exact_match"}
    config = Config.model_validate({"name": "x", "runs_dir": str(tmp_path / "file"), "data": data})
    assert check_data(config) == [f"data.path = {tmp_path}: no data file lies in this folder"]
    (tmp_path / "file").write_text(json.dumps({}))
    assert check_folder(config) == [f"runs_dir = {tmp_path}/file: {tmp_path}/file is no folder; choose another one"]


def test_a_folder_with_files_to_train_on_and_others_is_refused_and_descriptions_are_no_data(tmp_path: Path) -> None:
    for name in ("dataset_infos.json", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name[:11] for path in files_of([tmp_path])] == ["train-00000", "train-00001"]
    (tmp_path / "data" / "test-00000-of-00001.parquet").touch()
    with pytest.raises(ConfigError, match=r"/data has files of several splits \(test, train\): name the files of one"):
        files_of([tmp_path])
    assert len(files_of([tmp_path / "**" / "train*"])) == len(files_of([tmp_path / "data" / "train*"])) == 2


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["training/train-0.parquet"], False),
        (["train_test.jsonl"], False),
        (["train/unit-test-generation.jsonl", "train/algebra.jsonl"], False),
        (["train.jsonl", "config/eval.json"], False),
        (["train.jsonl", "trains.jsonl", "valley.jsonl"], False),
        (["test.jsonl", "dev.jsonl"], False),
        (["train.jsonl", "Validation1.jsonl"], True),
        (["main/train/0.parquet", "main/test/0.parquet"], True),
        (["train.jsonl", "eval/0.jsonl"], True),
    ],
)
def test_a_file_is_of_the_split_that_its_topmost_name_begins_with(
    names: list[str], refused: bool, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="several splits") if refused else nullcontext():
        assert len(files_of([tmp_path])) == len(names)


def test_roles_may_be_written_with_capital_letters() -> None:
    said = [{"role": "System", "content": "s"}, {"from": "Human", "value": "q"}, {"from": "GPT", "value": "a"}]
    assert [message["role"] for message in read_messages(said, {}) or ()] == ["system", "user"]


def test_a_question_may_begin_with_a_list_of_python() -> None:
    assert read_messages("[{'role': 'user', 'content': 'b'}] is a list of what?", {}) is None


def test_a_csv_file_of_a_spreadsheet_may_have_semicolons(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt;answer\n1+1,5;2,5\n", encoding="utf-8-sig")
    assert [row for _, row in read_rows(tmp_path / "rows.csv")] == [{"prompt": "1+1,5", "answer": "2,5"}]
    (tmp_path / "rows.csv").write_text('prompt,answer\n"a;b",2\n')
    assert [row for _, row in read_rows(tmp_path / "rows.csv")] == [{"prompt": "a;b", "answer": "2"}]


def test_data_sets_that_are_no_files_say_how_they_become_some(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    for place, words in (
        (str(tmp_path / "saved"), "was written by save_to_disk: write a split as Parquet, by its to_parquet"),
        ("openai/gsm8k", "openai/gsm8k: there is no such file; a data set of the hub is hub:OWNER/NAME"),
    ):
        data = {"source": "file", "path": place, "reward": "exact_match"}
        try:
            said = "".join(check_data(Config.model_validate({"name": "x", "data": data})))
        except ConfigError as error:
            said = str(error)
        assert words in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt,answer,answer\n1+1,2,3\n", "rows.csv has several columns 'answer': which one counts is not known"),
        ("\nprompt,answer\n1+1,2\n", "rows.csv begins with an empty line: the first one must name the columns"),
    ],
)
def test_a_csv_file_whose_columns_are_not_clear_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ConfigError, match=words):
        list(read_rows(tmp_path / "rows.csv"))


def test_a_map_in_parquet_is_an_object(tmp_path: Path) -> None:
    more = pa.array([[("answer", "2")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"prompt": ["1+1"], "more": more}), tmp_path / "rows.parquet")
    [(place, row)] = read_rows(tmp_path / "rows.parquet")
    assert find(row, "more.answer", place, "answer_column") == "2"


def test_a_parquet_file_with_two_columns_of_a_name_is_refused(tmp_path: Path) -> None:
    columns = [pa.array(["1+1"]), pa.array(["2"]), pa.array(["3"])]
    pq.write_table(pa.Table.from_arrays(columns, ["prompt", "answer", "answer"]), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="has several columns 'answer'"):
        list(read_rows(tmp_path / "rows.parquet", ["prompt", "answer"]))


def test_what_is_no_data_file_is_called_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to("moved.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, words in (
        ("link.jsonl", "it is a link to moved.jsonl, which is not there"),
        ("pipe.jsonl", "it is not a regular file (a pipe, for example), and data are read more than once"),
    ):
        data = {"source": "file", "path": str(tmp_path / name), "reward": "exact_match"}
        config = Config.model_validate({"name": "x", "runs_dir": str(tmp_path), "data": data})
        assert check_data(config) == [f"data.path = {tmp_path / name}: {words}"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            gzip.compress(b'{"prompt": "1+1", "answer": "2"}', mtime=0),
            r"has the content of a \.gz file: its name must end so",
        ),
        (b"PAR1\x15\x04\x15", r"has the content of a \.parquet file: its name must end so"),
        (
            b'[\n{"prompt": "1+1", "answer": "2"}\n]\n',
            r"line 1 is not JSON.*; an object or list of several lines is a \.json",
        ),
    ],
)
def test_a_file_that_is_named_as_another_kind_says_which_it_is(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        list(read_rows(tmp_path / "rows.jsonl"))


def test_rows_that_all_ask_the_same_are_said_to_leave_none_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text((json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n") * 9)
    data = {"source": "file", "path": str(tmp_path / "rows.jsonl"), "reward": "exact_match"}
    [line] = check_data(Config.model_validate({"name": "x", "runs_dir": str(tmp_path), "data": data}))
    assert line.endswith("none asks something else than the 1 of them do; add rows, or hold out fewer or others")
