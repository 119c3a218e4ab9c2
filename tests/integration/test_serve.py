"""`specrl serve` registers a schedule with Prefect; each of its flow runs is a run of its own."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.folder import is_worked_on
from flows.server import PrefectServer
from slurm.backend import JobKey
from slurm.environment import ROOT
from slurm.submit import find, live_jobs
from specrl.config import Config
from specrl.report.results import read_config
from tests.integration.pipeline_runs import SMOKE, finish, specrl, wait_for
from tests.prefect_api import request


def call(url: str, *, seconds: float = 120, **body: Any) -> Any:
    """What Prefect's server answers; while its database is busy that is 503, and one asks again, as its client does."""
    question = request(url, body)
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(question, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def first_with(url: str, key: str, values: tuple[str, ...], seconds: float = 600, **filters: Any) -> Any:
    """The first entry of a listing whose `key` is one of `values`, once there is one; the server may be others' too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := [entry for entry in call(f"{url}/filter", **filters) if entry[key] in values]:
            return found[0]
        time.sleep(0.3)
    raise AssertionError(f"no {key} of {values} in {url} after {seconds} s")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with PrefectServer(tmp_path_factory.mktemp("served")) as running:
        running.wait()
        yield running


class Served:
    """`specrl serve` on its way, with its deployment in Prefect."""

    def __init__(self, server: PrefectServer, runs: Path, *settings: str) -> None:
        self.server, self.runs = server, runs
        name = runs.parent.name
        cron = ["--cron", "0 3 1 1 *", "--time-zone", "Europe/Berlin"]
        self.process = specrl("serve", str(SMOKE), *cron, f"--set=runs_dir={runs}", f"--set=name={name}", *settings)
        self.deployment = first_with(f"{server.url}/deployments", "name", (name,))

    def trigger(self) -> dict[str, Any]:
        """Let Prefect run it now."""
        made = call(f"{self.server.url}/deployments/{self.deployment['id']}/create_flow_run")
        return {"id": {"any_": [made["id"]]}}

    def trigger_until_a_job_runs(self) -> Config:
        """Let Prefect run it now, and return the run's configuration once its first job is there."""
        self.trigger()
        return read_config(wait_for(self.runs, "*/jobs/prepare-*.json").parents[1])

    def end(self, number: signal.Signals) -> str:
        """What it printed until it ended by itself after one signal to it alone."""
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, output
        assert "Traceback" not in output, output
        return output


def test_a_served_configuration_runs_when_prefect_says_so(tmp_path: Path, server: PrefectServer) -> None:
    problems, runs = tmp_path / "problems.jsonl", tmp_path / "runs"
    problems.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(80)))
    data = {"source": "file", "path": str(problems), "reward": "exact_match"}
    with pytest.raises(urllib.error.HTTPError, match="401"):  # as another user of this machine would
        urllib.request.urlopen(f"{server.url}/admin/version", timeout=60)
    served = Served(server, runs, *[f"--set=data.{key}={value}" for key, value in data.items()])
    try:
        (schedule,) = (entry["schedule"] for entry in served.deployment["schedules"])
        assert (schedule["cron"], schedule["timezone"]) == ("0 3 1 1 *", "Europe/Berlin")
        problems.unlink()
        own = served.trigger()
        ended = ("FAILED", "CRASHED", "COMPLETED")
        failed = first_with(f"{server.url}/flow_runs", "state_type", ended, flow_runs=own)
    finally:
        output = served.end(signal.SIGINT)
    # What a run needs is looked at again at its own time, and a run that cannot start leaves nothing behind.
    assert f"{problems}: there is no such file" in failed["state"]["message"]
    assert not list(runs.glob("*"))
    assert output.endswith("no run was at work\n")


def test_sigterm_leaves_the_job_and_sigint_cancels_it(tmp_path: Path, server: PrefectServer) -> None:
    # Minutes of work, or the job may have finished before anybody looks.
    long = ("--set=warm_start.batch_size=1", "--set=warm_start.num_examples=24000")
    served = Served(server, tmp_path / "runs", *long)
    config = served.trigger_until_a_job_runs()
    output = served.end(signal.SIGTERM)
    ((key, job),) = live_jobs(config).items()
    try:
        assert output.splitlines()[-1] == (
            f"run {config.name}: local job {job.job_id} goes on; specrl resume {config.run_dir} continues the run"
        )
        assert not is_worked_on(config.run_dir)
    finally:
        job.cancel()
    served = Served(server, tmp_path / "more" / "runs", *long)
    config = served.trigger_until_a_job_runs()
    ((key, job),) = live_jobs(config).items()
    output = served.end(signal.SIGINT)
    assert f"run {config.name}: local job {job.job_id} was cancelled; specrl resume " in output.splitlines()[-1]
    assert find(JobKey(config, key)) is None


def test_a_schedule_is_registered_with_an_existing_server_and_pool(tmp_path: Path, server: PrefectServer) -> None:
    arguments = ["deploy", str(SMOKE), "--cron", "0 3 1 1 *", f"--set=runs_dir={tmp_path}", "--set=name=deployed"]
    refused = specrl(*arguments, "--pool", "nowhere")
    assert refused.communicate(timeout=600)[0] == (
        "specrl: --pool nowhere: the Prefect server has no such work pool; it has: none; "
        "prefect work-pool create nowhere --type process makes one\n"
    )
    assert refused.returncode == 2
    with urllib.request.urlopen(request(f"{server.url}/work_pools/", {"name": "gpus", "type": "process"}), timeout=60):
        pass
    for _ in range(2):  # the second one replaces the first
        finish(specrl(*arguments, "--pool", "gpus"))
    listed = call(f"{server.url}/deployments/filter")
    (deployed,) = [entry for entry in listed if entry["name"] == "deployed"]
    assert (deployed["work_pool_name"], deployed["entrypoint"]) == ("gpus", "flows.scheduled.scheduled")
    variables = deployed["job_variables"]["env"]  # a worker need not be started in the checkout
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT) and variables["PYTHONSAFEPATH"] == "1"
    assert [schedule["schedule"]["cron"] for schedule in deployed["schedules"]] == ["0 3 1 1 *"]


def test_a_server_that_does_not_answer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    arguments = ["deploy", str(SMOKE), "--cron", "0 3 1 1 *", f"--set=runs_dir={tmp_path}", "--pool", "gpus"]
    process = specrl(*arguments)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert output.startswith("specrl: no Prefect server answers at http://127.0.0.1:9/api (")
    assert len(output.splitlines()) == 1
