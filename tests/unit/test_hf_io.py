"""The one reader and the one writer of safetensors directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specrl.models import hf_io
from specrl.models.directory import weight_files
from specrl.models.hf_io import TensorReader, write_model, write_tensors

TENSORS = {
    "a": torch.arange(24.0).reshape(6, 4),
    "b": torch.arange(6, dtype=torch.int64),
    "c": torch.arange(24.0).reshape(4, 6).t().bfloat16(),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory that brings everything but weights."""
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize(("file_bytes", "num_files"), [(10**6, 1), (100, 2)])
def test_what_is_written_is_read_whole_or_in_parts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int, num_files: int
) -> None:
    monkeypatch.setattr(hf_io, "FILE_BYTES", file_bytes)
    directory = tmp_path / "model"
    write_model(directory, source, iter(TENSORS.items()), torch.float32, writes=True)
    assert len(weight_files(directory)) == num_files
    assert len(list(directory.glob("*.safetensors"))) == num_files
    assert json.loads((directory / "config.json").read_text())["dtype"] == "float32"
    reader = TensorReader(directory)
    assert reader.names == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert reader.shape(name) == tuple(tensor.shape)
        assert torch.equal(reader.read(name), tensor) and reader.read(name).dtype == tensor.dtype
        assert torch.equal(reader.read_slice(name, 1, 3), tensor[1:3])
    assert torch.equal(reader.read_slice("a", 1, 4, dim=1), TENSORS["a"][:, 1:4])
    assert dict(reader.items()).keys() == TENSORS.keys()


def test_a_rank_that_does_not_write_takes_the_tensors_all_the_same(source: Path, tmp_path: Path) -> None:
    tensors = iter(TENSORS.items())
    write_model(tmp_path / "model", source, tensors, torch.float32, writes=False)
    assert next(tensors, None) is None
    assert not (tmp_path / "model").exists()


def test_a_file_has_the_permissions_of_any_new_file_and_is_complete(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_tensors(tmp_path / "model.safetensors", TENSORS)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"other", "model.safetensors"}
    assert load_file(tmp_path / "model.safetensors").keys() == TENSORS.keys()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no weights in .*: model\.safetensors is missing"):
        TensorReader(tmp_path)
    write_tensors(tmp_path / "model.safetensors", TENSORS)
    for attempt in (TensorReader(tmp_path).read, TensorReader(tmp_path).shape):
        with pytest.raises(ValueError, match="has no tensor 'd'"):
            attempt("d")
