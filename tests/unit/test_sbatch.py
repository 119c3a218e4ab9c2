"""What a job on Slurm is submitted with, as it stands in the batch script, and the environment of its ranks."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from submitit.slurm.slurm import _make_sbatch_string

from flows.cli import invoke
from flows.preflight import check_cluster, check_sbatch
from slurm.backend import JobKey, StageRequest, State
from slurm.commands import describe, parameters, python_command, sbatch_options
from slurm.environment import (
    CACHES,
    FULL_FLOAT32,
    cache_folders,
    device_variables,
    job_environment,
    process_variables,
)
from slurm.failures import explain
from slurm.local import visible_devices
from slurm.slurm_backend import ONE_HOST, SlurmJob, interface_towards
from slurm.submit import backend_of, backends_of
from specrl.config import STAGES, Config, ConfigError, Resources, StageName, parse_config
from specrl.context import StageContext
from tasks.detached import _job_config

GPUS = {"gpus_per_rank": 1, "ranks_per_node": 4}


def configured(tmp_path: Path, **sections: Any) -> Config:
    return parse_config(
        {
            "name": "run",
            "runs_dir": str(tmp_path / "runs"),
            "model": {"source": "tiny"},
            "train": {"prompts_per_step": 8},
            **sections,
            "cluster": {"backend": "slurm", **sections.get("cluster", {})},
        }
    )


def script(config: Config, stage: StageName = "train") -> tuple[set[str], list[str]]:
    """The options of the batch script, and the words of the command in it."""
    context = StageContext(config, stage, f"{stage}-0", config.run_dir / "stages", {}, "")
    request = StageRequest(context, "a.b:main", config.run_dir / "code" / "0123")
    text = _make_sbatch_string(
        shlex.join([*python_command(config, stage), *request.arguments]),
        request.key.folder,
        **parameters(request, {"PYTHONPATH": "/code"}),
    )
    lines = text.splitlines()
    options = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    (command,) = [line for line in lines if line.startswith("srun")]
    return options, shlex.split(command)


def exports(config: Config) -> list[str]:
    context = StageContext(config, "train", "train-0", config.run_dir / "stages", {}, "")
    request = StageRequest(context, "a.b:main", config.run_dir / "code" / "0123")
    return list(parameters(request, {"PYTHONPATH": "/code"})["setup"])


def test_any_option_of_sbatch_is_passed_through_by_stage(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        resources=GPUS,
        cluster={
            "partition": "gpu",
            "sbatch": {"gres": "gpu:h100:4", "exclusive": True, "mail_type": "END", "comment": "a b"},
        },
        stage_resources={
            "prepare": {
                "gpus_per_rank": 0,
                "ranks_per_node": 1,
                "partition": "cpu",
                "account": "other",
                "qos": "short",
                "sbatch": {"exclusive": False, "reservation": "night"},
            }
        },
    )
    options, _ = script(config)
    assert {"partition=gpu", "gres=gpu:h100:4", "exclusive", "mail-type=END", "comment='a b'"} <= options
    memory = f"mem={4 * Resources().memory_gib_per_rank * 1024:.0f}M"
    assert {"nodes=1", "ntasks-per-node=4", "cpus-per-task=2", memory, "time=60", "requeue"} <= options
    assert not any(option.startswith(("gpus-per-node", "wckey")) for option in options)
    options, _ = script(config, "prepare")
    assert {"partition=cpu", "account=other", "qos=short", "reservation=night", "comment='a b'"} <= options
    assert not any(option.startswith(("gres", "gpus", "exclusive")) for option in options)
    options, _ = script(configured(tmp_path, resources=GPUS))
    assert "gpus-per-node=4" in options


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"cluster": {"sbatch": {"job-name": "mine"}}},
            "cluster.sbatch: job-name is an option that specrl sets itself",
        ),
        (
            {"cluster": {"sbatch": {"mem": "10G"}}},
            "mem is an option that specrl sets itself; set resources.memory_gib_per_rank, or cluster.request_mem",
        ),
        (
            {"stage_resources": {"train": {"sbatch": {"time": 5}}}},
            "stage_resources.train.sbatch: time is an option that specrl sets itself; set resources.minutes",
        ),
        ({"cluster": {"sbatch": {"p": "gpu"}}}, "cluster.sbatch: 'p' is not the long name of an option"),
        ({"cluster": {"sbatch": {"comment": "a\n#SBATCH --wrap=x"}}}, "comment = "),
        ({"cluster": {"sbatch": {"reservation": ["a"]}}}, "reservation = ['a'] must be a number, true, false"),
        ({"cluster": {"sbatch": {"gres": "gpu:2"}}, "resources": GPUS}, "cluster.sbatch.gres = 'gpu:2' gives 2 GPUs"),
        (
            {"stage_resources": {"train": {"sbatch": {"gpus-per-task": 1}}}},
            "stage_resources.train.sbatch.gpus-per-task = 1 asks for GPUs, and the train stage has gpus_per_rank = 0",
        ),
        ({"cluster": {"container": {"kind": "docker", "image": "x"}}}, "cluster.container.kind = 'docker'"),
        (
            {"cluster": {"container": {"kind": "pyxis", "image": "x", "mounts": ["data:/data"]}}},
            "cluster.container.mounts.0: 'data:/data' must be /SOURCE",
        ),
    ],
)
def test_a_wrong_option_is_one_line(sections: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, **sections)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_options_that_neither_sbatch_nor_a_plugin_of_the_site_has_are_refused_before_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"cluster": {"sbatch": {"frobnicate": 1, "reservaton": "x", "gpu_mode": "shared", "nice": 5}}}
    config = configured(tmp_path, **options, stage_resources={"train": {"sbatch": {"exclusiv": True}}})
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho '      --gpu-mode=MODE   of the plugin'\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    first, second, third = check_sbatch(config)
    assert first.startswith("cluster.sbatch.frobnicate: sbatch has no option --frobnicate; sbatch --help lists")
    assert second.startswith("cluster.sbatch.reservaton: sbatch has no option --reservaton; perhaps reservation;")
    assert third.startswith("stage_resources.train.sbatch.exclusiv: sbatch has no option --exclusiv; perhaps exclusive")
    usual = {"mail_type": "END", "mail-user": "me@example.org", "gpus-per-socket": 1, "exclude": "node1"}
    assert check_sbatch(configured(tmp_path, cluster={"sbatch": usual})) == []
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    assert check_sbatch(configured(tmp_path, cluster={"sbatch": usual})) == []
    assert "gpu-mode" in "".join(check_sbatch(config))
    assert check_sbatch(configured(tmp_path, **{"cluster": {**options["cluster"], "backend": "local"}})) == []


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, "singleton"),
        ({"dependency": "afterok:7,afterany:8"}, "singleton,afterok:7,afterany:8"),
        ({"dependency": "singleton"}, "singleton"),
        ({"dependency": "afterok:7?afterok:8"}, "afterok:7?afterok:8"),
    ],
)
def test_a_dependency_of_the_user_stands_beside_the_guard_against_two_jobs_for_a_stage(
    given: dict[str, str], asked: str, tmp_path: Path
) -> None:
    assert sbatch_options(configured(tmp_path, cluster={"sbatch": given}), "train")["dependency"] == asked


def test_a_dry_run_without_sbatch_warns_of_options_that_only_a_plugin_could_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "run"\n[model]\nsource = "tiny"\nmax_length = 128\n[sampling]\nmax_response_tokens = 64\n')
    options = ["--set", 'cluster.sbatch={gpu_mode="shared",nice=5}', "--set", "stage_resources.train.sbatch={tmpfs=1}"]
    asked = ["run", str(path), "--dry-run", "--cluster", "slurm", "--set", "drafter.draft_vocab_size=64", *options]
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert invoke(asked) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: cluster.sbatch.gpu-mode, stage_resources.train.sbatch.tmpfs: Slurm itself has no ")
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho '      --tmpfs=SIZE   of the plugin'\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    assert invoke(asked) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specrl: cluster.sbatch.gpu-mode: sbatch has no option --gpu-mode")


def test_a_site_that_refuses_the_option_for_memory_gets_none(tmp_path: Path) -> None:
    asking, silent = (configured(tmp_path, cluster={"request_memory": asks}) for asks in (True, False))
    assert [option for option in script(asking)[0] if option.startswith("mem")] == ["mem=10240M"]
    assert script(silent)[0] == script(asking)[0] - {"mem=10240M"}
    assert "--mem" not in describe(silent, "train") and "--mem=10240M" in describe(asking, "train")
    killed, job = (
        State("ended", "OUT_OF_MEMORY", failed=True, reason="out of memory"),
        SlurmJob("7", tmp_path, attached=False),
    )
    lines = [
        explain(job, StageContext(config, "train", "train-0", tmp_path, {}, ""), killed) for config in (asking, silent)
    ]
    assert "resources.memory_gib_per_rank = 10; raise it" in lines[0]
    assert "asks for none (cluster.request_memory = false); ask for more cores" in lines[1]


def test_ranks_run_in_a_container(tmp_path: Path) -> None:
    mounts = f"{tmp_path}/runs:{tmp_path}/runs,{Path.cwd()}:{Path.cwd()},/data:/data:ro"
    container = {"image": "specrl.sif", "mounts": ["/data:/data:ro"]}
    pyxis = configured(tmp_path, cluster={"container": {"kind": "pyxis", **container}})
    _, command = script(pyxis)
    assert {"--container-image=specrl.sif", f"--container-mounts={mounts}"} <= set(command)
    assert command[-11:-8] == ["python3", "-I", "-c"]
    assert "export PYTHONNOUSERSITE=1" in exports(pyxis)  # packages in ~/.local are the host's
    assert "export PYTHONNOUSERSITE=1" not in exports(configured(tmp_path))
    assert "PYTHONNOUSERSITE" not in job_environment(Path("/code"), pyxis)  # which local jobs of such a run have, too
    apptainer = {"container": {"kind": "apptainer", **container}, "python": "/opt/venv/bin/python"}
    _, command = script(configured(tmp_path, cluster=apptainer, resources=GPUS))
    start = command.index("apptainer")
    assert command[start : start + 5] == ["apptainer", "exec", "--nv", "--bind", mounts]
    assert command[start + 7 : start + 10] == ["specrl.sif", "/opt/venv/bin/python", "-I"]
    _, command = script(configured(tmp_path))
    assert sys.executable in command
    local = configured(tmp_path, cluster={"backend": "local", "container": {"kind": "pyxis", "image": "x"}})
    assert check_cluster(local) == [
        "cluster.container: --cluster local starts ranks outside of containers; remove the section"
    ]


def test_a_stage_may_run_where_the_flow_runs(tmp_path: Path) -> None:
    config = configured(tmp_path, stage_resources={"prepare": {"backend": "local"}})
    assert backend_of(JobKey(config, "prepare-0").cluster).name == "local"
    assert backend_of(JobKey(config, "train-0").cluster).name == "slurm"
    assert [backend.name for backend in backends_of(config)] == ["local", "slurm"]


def test_the_dry_run_prints_the_options_of_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "run"\n[model]\nsource = "tiny"\nmax_length = 128\n[sampling]\nmax_response_tokens = 64\n'
        '[cluster]\nbackend = "slurm"\npartition = "gpu"\nsbatch = { reservation = "night" }\n'
        '[drafter]\ndraft_vocab_size = 64\n[stage_resources.prepare]\nbackend = "local"\n'
        '[stage_resources.export]\npartition = "cpu"\n'
    )
    assert invoke(["run", str(path), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (train,) = [line for line in lines if line.startswith("train: ")]
    assert train.startswith("train: sbatch --partition=gpu --nodes=1 ")
    assert "--reservation=night; srun --cpus-per-task=2" in train
    assert any(line.startswith("export: sbatch --partition=cpu") for line in lines)
    assert not any(line.startswith("prepare: sbatch") for line in lines)
    assert "--mem=10240M" in train
    assert invoke(["run", str(path), "--dry-run", "--set", "cluster.request_memory=false"]) == 0
    printed = capsys.readouterr().out
    assert "--mem" not in printed and printed.count("not asked for") == len(STAGES)


def test_products_in_float32_on_a_gpu_are_no_tf32() -> None:
    assert process_variables(1, "float32", has_gpus=True)["NVIDIA_TF32_OVERRIDE"] == "0"
    for dtype, has_gpus in (("bfloat16", True), ("float32", False)):
        assert FULL_FLOAT32.keys().isdisjoint(process_variables(1, dtype, has_gpus=has_gpus))


def test_a_rank_that_sees_one_gpu_takes_it_as_number_0() -> None:
    resources = Resources(ranks_per_node=4, gpus_per_rank=1)
    assert device_variables(resources, "2") == {"LOCAL_RANK": "0"}
    assert device_variables(resources, "0,1,2,3") == {}
    assert device_variables(resources, None) == {}
    assert device_variables(Resources(), "0,1") == {"CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(ValueError, match="sees 0 GPUs"):
        device_variables(resources, "")
    with pytest.raises(ValueError, match=r"sees 2 GPUs \(CUDA_VISIBLE_DEVICES = '0,1'\) on a node with 4 ranks"):
        device_variables(resources, "0,1")


def test_the_interface_is_that_of_the_route() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:  # packets to one's own address come from that address
                assert interface_towards(address.address) == name
    with pytest.raises(ValueError, match="no network interface leads to no-such-host"):
        interface_towards("no-such-host.invalid")


def test_ranks_of_two_nodes_use_the_interface_towards_the_other_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ONE_HOST, raising=False)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    for name, value in {"JOB_ID": "1", "JOB_NUM_NODES": "2", "NTASKS": "2", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    addresses = [
        (name, address.address)
        for name, found in psutil.net_if_addrs().items()
        for address in found
        if address.family == socket.AF_INET
    ]
    for named, interface in ((None, None), ("ib0", "ib0")):
        config = configured(tmp_path, resources={"nodes": 2}, cluster={"interface": named} if named else {})
        request = StageRequest(StageContext(config, "train", "train-0", tmp_path, {}, ""), "a.b:main")
        for name, address in addresses:  # of another node, to which the route is this interface
            for node, nodes in (("0", f"first,{address}"), ("1", f"{address},second")):
                monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
                monkeypatch.setenv("SLURM_NODEID", node)
                monkeypatch.setenv("SLURM_PROCID", node)
                found = backend_of(config.cluster).rank_environment(request)
                assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == (interface or name)
                assert (found["RANK"], found["MASTER_ADDR"]) == (node, nodes.split(",")[0])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib1")  # as a line of `cluster.setup` exports it
    interfaces = ({}, addresses[-1][0], "ib1"), ({"interface": "ib0"}, "ib0", "ib0")
    for cluster, gloo, nccl in interfaces:
        config = configured(tmp_path, resources={"nodes": 2}, cluster=cluster)
        request = StageRequest(StageContext(config, "train", "train-0", tmp_path, {}, ""), "a.b:main")
        found = backend_of(config.cluster).rank_environment(request)
        assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == (gloo, nccl)


def test_a_job_that_is_being_warned_does_not_end_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    config = configured(tmp_path)
    request = StageRequest(StageContext(config, "train", "train-0", tmp_path, {}, ""), "a.b:main")
    for word, ends in (("RUNNING", False), ("SIGNALING", False), ("COMPLETING", True), ("PREEMPTED", True)):
        (tmp_path / "squeue").write_text(f'#!/bin/sh\ndate -d 2026-11-24T18:00:00 "+{word} $SLURM_TIME_FORMAT"\n')
        (tmp_path / "squeue").chmod(0o755)
        place = backend_of(config.cluster).place(request)
        assert (place.job_id, place.is_ending, place.end_at is None) == ("7", ends, ends)


def test_compiled_code_lies_on_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "job"))
    folders = cache_folders(None)
    assert folders.keys() == CACHES.keys()
    assert all(Path(folder).is_dir() and folder.startswith(f"{tmp_path}/job/") for folder in folders.values())
    monkeypatch.delenv("SLURM_TMPDIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"specrl-{os.getuid()}"
    assert cache_folders(None)["TRITON_CACHE_DIR"] == str(own / "triton")
    own.chmod(0o777)  # others could put code there
    assert not cache_folders(None)["TRITON_CACHE_DIR"].startswith(str(own / "triton"))
    monkeypatch.setenv("PLACE", str(tmp_path / "place"))
    assert cache_folders("$PLACE/cache")["VLLM_CACHE_ROOT"] == str(tmp_path / "place" / "cache" / "vllm")
    with pytest.raises(ValueError, match="a variable in it is not set"):
        cache_folders("$NO_SUCH_PLACE/cache")


def test_a_local_job_without_gpus_hands_on_the_devices_that_its_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    chosen = {}
    for gpus in (0, 1):
        config = configured(tmp_path, resources={"gpus_per_rank": gpus})
        chosen[gpus] = visible_devices(StageRequest(StageContext(config, "train", "train-0", tmp_path, {}, ""), "a:b"))
    assert chosen == {0: "2,3", 1: "2"}


def test_the_job_of_a_flow_takes_no_whole_node_whatever_options_it_has_of_its_own(tmp_path: Path) -> None:
    options = {"exclusive": True, "mem-per-cpu": "30G", "reservation": "spring"}
    own = {"flow": {"sbatch": {"comment": "waits"}}}
    config = _job_config(configured(tmp_path, cluster={"sbatch": options}, stage_resources=own))
    assert config.cluster_of("flow").sbatch == {"reservation": "spring", "comment": "waits"}
    assert config.resources_of("flow").memory_gib_per_rank == 4
