"""What is said of data files whose columns or contents are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.preflight import check_data, check_folder
from specrl.config import Config, ConfigError
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
