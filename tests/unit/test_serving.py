"""`specrl serve-model` as far as it needs no server: what it refuses, and what it mends in vLLM."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from flows.cli import invoke
from flows.commands.options import usable_port
from specrl.artifacts import ExportResult, write_result, write_text
from specrl.config import dump_config, parse_config
from specrl.serving.process import expand


def exported(tmp_path: Path, **result: Path | None) -> str:
    """The folder of a run that has exported this, or nothing yet."""
    config = parse_config({"name": "served", "runs_dir": str(tmp_path), "speculation": {"method": "ngram"}})
    write_text(config.run_dir / "config.json", dump_config(config))
    if result:
        found = ExportResult.model_validate({**result, "vllm_acceptance_length": None, "seconds": 1.0})
        write_result(config.run_dir / "stages" / "export-0", found)
    return str(config.run_dir)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert invoke(["serve-model", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    return captured.err


def test_a_run_that_cannot_be_served_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run nobody" in complaint(capsys, "nobody", "--runs-dir", str(tmp_path))
    assert "has not finished export; continue it with: specrl resume" in complaint(capsys, exported(tmp_path))
    run = exported(tmp_path, policy_dir=tmp_path, drafter_dir=None)
    assert 'no drafter: its speculation.method is "ngram"' in complaint(capsys, run)
    run = exported(tmp_path, policy_dir=tmp_path, drafter_dir=tmp_path / "gone")
    assert f"{tmp_path / 'gone'} is gone" in complaint(capsys, run)


def test_the_servers_processes_are_spawned_whatever_a_shell_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr("flows.commands.export.serve_arguments", lambda *_: ["vllm", "serve", "policy"])
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words[2]))
    assert invoke(["serve-model", exported(tmp_path, policy_dir=tmp_path, drafter_dir=tmp_path)]) == 0
    assert started[0]["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_a_port_in_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = exported(tmp_path, policy_dir=tmp_path, drafter_dir=tmp_path)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert f"--port {port}: 127.0.0.1:{port} cannot be used" in complaint(capsys, run, "--port", str(port))
        for words in (["--port", str(port)], ["--port", "99999"]):
            assert invoke(["ui", "--runs-dir", str(tmp_path), *words]) == 2
            assert f"--port {words[1]}: 127.0.0.1:{words[1]} cannot be used (" in capsys.readouterr().err
        assert usable_port(None, port) != port
    assert invoke(["ui", "--runs-dir", str(tmp_path / "absent")]) == 2
    assert "absent, which is no folder" in capsys.readouterr().err
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_draft_token_gets_the_value_of_its_request(dtype: torch.dtype) -> None:
    output = torch.full((6,), 99, dtype=dtype)
    expand(output, torch.tensor([0, 7, 5], dtype=dtype), torch.tensor([2, 2, 6], dtype=torch.int32), 0, 1, 128)
    assert output.tolist() == [1, 1, 5, 5, 5, 5]
