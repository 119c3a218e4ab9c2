"""`specrl serve-model` as far as it needs no server: what it refuses, what it counts, and what it mends in vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from flows.cli import invoke
from flows.commands.options import usable_port
from specrl.artifacts import ExportResult, write_result, write_text
from specrl.config import dump_config, parse_config
from specrl.data.problems import Prompt
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.serving.process import expand
from specrl.serving.server import body_of, parse_metrics

PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:generation_tokens_total{engine="0",model_name="p"} 31.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="p"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="p"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="p"} 11.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="p",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="p",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="p",position="0"} 1.7e+09
"""


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
    assert "has exported nothing yet; continue it with: specrl resume" in complaint(capsys, exported(tmp_path))
    run = exported(tmp_path, policy_dir=tmp_path, drafter_dir=None)
    assert 'no drafter to serve: its speculation.method is "ngram"' in complaint(capsys, run)
    run = exported(tmp_path, policy_dir=tmp_path, drafter_dir=tmp_path / "gone")
    assert f"{tmp_path / 'gone'} is gone" in complaint(capsys, run)


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


def test_acceptance_is_read_from_the_servers_metrics() -> None:
    tokens, stats = parse_metrics(PAGE)
    assert (tokens, stats.acceptance_length, stats.acceptance_rate_per_pos) == (31, 2.1, (0.8, 0.3))
    assert parse_metrics("") == (0, SpeculationStats())


def test_a_request_leaves_no_setting_of_sampling_to_the_generation_config_of_the_model() -> None:
    body = body_of(Prompt(0, "", [1, 2], ""), parse_config({"name": "x", "model": {"source": "tiny"}}))
    taken = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"}  # by vLLM, from there
    assert taken <= body.keys() and (body["min_p"], body["repetition_penalty"]) == (0.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_draft_token_gets_the_value_of_its_request(dtype: torch.dtype) -> None:
    output = torch.full((6,), 99, dtype=dtype)
    expand(output, torch.tensor([0, 7, 5], dtype=dtype), torch.tensor([2, 2, 6], dtype=torch.int32), 0, 1, 128)
    assert output.tolist() == [1, 1, 5, 5, 5, 5]


def test_a_server_and_its_own_processes_end_with_a_command_that_is_killed() -> None:
    server = "\n".join(
        [
            "import subprocess, sys, time",
            "from specrl.serving.process import _end_with",
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
            "print(child.pid, flush=True)",
            "_end_with(int(sys.argv[1]))",
        ]
    )
    command = (
        "import os, subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {server!r}, str(os.getpid())], start_new_session=True);"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    own = child.parent()
    assert own is not None and own.pid != parent.pid
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs([child, own], timeout=120)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
