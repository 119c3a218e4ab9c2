"""What ranks do while they wait changes no rollout and no weight of the policy, whatever is killed (FP32)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from specrl.artifacts import TrainResult, read_curve, read_result
from specrl.events import read_events
from specrl.metrics import METRICS, find_metric
from specrl.projection.simulator.generation import DecodingSpeed, SimulatedResponse, simulate
from specrl.rollout.bubbles.texts import read_texts
from specrl.schemas import read_folder
from tests.checkpoints import whole_state
from tests.integration.loop_plan import ON_FAILURE, LoopRun
from tests.integration.pipeline_runs import outside_of_engines
from tests.unit.test_metrics import OF_A_STEP

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
COLUMNS = ["step", "prompt_id", "sample", "seed", "response_tokens", "reward", "advantage", "finish_reason"]
REPLAY = {"method": "replay", "adaptive": False}
BOTH = {"speculation": {"method": "eagle3+replay"}, "bubbles": {"use": "both"}}
DRAFTING = {**BOTH, "speculation": {**BOTH["speculation"], "adaptive": False}}
"""On any machine; a controller may find that drafts cost more than they save."""
DEALT: dict[str, Any] = {"train": {"whole_groups": False}}
SETS = {"sampled": {"num_prompts": 3, "samples_per_prompt": 4}, "greedy": {"num_prompts": 5, "temperature": 0}}
VALIDATED = {"validate": {"every": 2, "sets": SETS}}
"""No run without it may differ in anything but time."""
PAIRS = {"speed_batches": [2, 8], "speed_prompts": 8, "speed_repeats": 2}
LONG = {"train": {"num_steps": 12, "keep_every": 5}}
STOP = {"metric": "reward/mean", "no_gain_for": 2}
NUM_KILLS, NUM_KILLS_OF_FOUR = 8, 2
RUNS = [
    LoopRun("none", settings={"speculation": {"adaptive": False}}),
    LoopRun("alone", ranks=1, settings={"speculation": {"adaptive": False}}),
    LoopRun("none-long", settings={"speculation": {"adaptive": False}, **LONG}),
    LoopRun("pregenerate", uneven=True, settings={"speculation": REPLAY, "bubbles": {"use": "pregenerate"}}),
    LoopRun("train_drafter", uneven=True, settings={"bubbles": {"use": "train_drafter"}}),
    LoopRun("both", uneven=True, measures=True, settings={**DRAFTING, "validate": {**VALIDATED["validate"], **PAIRS}}),
    LoopRun("both-long-validated", settings={**BOTH, **LONG, **VALIDATED}),
    LoopRun("stopped", kills=1, settings={**BOTH, **VALIDATED, "train": {**LONG["train"], "stop_when": STOP}}),
    LoopRun("both-long-killed", kills=NUM_KILLS, settings={**BOTH, **LONG, **VALIDATED}),
    LoopRun("extended", continues="none", settings={"speculation": {"adaptive": False}, "train": {"num_steps": 5}}),
    LoopRun("forked", ranks=1, continues="none", counts_on=False, settings={"seed": 5, "train": {"num_steps": 1}}),
    LoopRun("tracked", ranks=1, outage=(1, 5), settings={"train": {"num_steps": 8}}),
    LoopRun("left", leaves=True, settings={**BOTH, "train": {"checkpoint_every": 3}}),
    LoopRun("four-ranks", ranks=4, settings=DEALT),
    LoopRun("four-ranks-both-killed", ranks=4, kills=NUM_KILLS_OF_FOUR, settings={**BOTH, **DEALT}),
    LoopRun(
        "tensor-parallel-both-killed",
        ranks=4,
        kills=1,
        settings={**BOTH, "engine": {"tensor_parallel": 2}},
    ),
    LoopRun(
        "truncated",
        ranks=1,
        settings={
            "sampling": {"temperature": 1.3, "top_p": 0.5, "top_k": 5},
            "train": {"num_steps": 1, "drop_zero_signal_groups": False},
        },
    ),
]
FAILING = {"reward": "tests.integration.loop_plan:failing_reward", "reward_timeout_s": 6.0}
STEADY = {"reward": "tests.integration.loop_plan:steady_reward"}
RUNS += [
    LoopRun("failing-reward", settings={"data": {**FAILING, "reward_on_failure": ON_FAILURE}}),
    LoopRun("steady-reward", settings={"data": STEADY}),
]
EVERY_METRIC = LoopRun(
    "every-metric",
    settings={
        **BOTH,
        **VALIDATED,
        "train": {"kl_coef": 0.01, "updates_per_step": 2, "refill_rounds": 1, "overlong_window": 0.2},
    },
)
MOVED = LoopRun("2-ranks-to-1", ranks=1, resumes="none", damaged=True, settings={"train": {"num_steps": 4}})
MOVED_AGAIN = LoopRun(
    "1-rank-to-4",
    ranks=4,
    resumes=MOVED.name,
    settings={
        "policy": {"tensor_parallel": 2, "pipeline_parallel": 2},
        "bubbles": {"use": "train_drafter"},
        "train": {"num_steps": 5},
    },
)
RUNS += [EVERY_METRIC, MOVED, MOVED_AGAIN]
# Of a random policy it is the seed that decides how often a response leaves the text of its own seed.
RUNS = [replace(run, settings={"seed": 6} | run.settings) for run in RUNS]
NAMES = [run.name for run in RUNS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bubbles")
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in RUNS]))
    command = [sys.executable, "-m", "tests.integration.loop_runs", str(folder), str(folder / "runs.json")]
    environment = {**outside_of_engines(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def rollouts(run_dir: Path) -> list[dict[str, Any]]:
    table = pyarrow.dataset.dataset(run_dir / "train-toy" / "rollouts", format="ipc").to_table(columns=COLUMNS)
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["prompt_id"], row["sample"]))


def policy(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "train-toy" / "policy" / "model.safetensors")


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("train-toy/steps/*.json"))]


@pytest.mark.parametrize(
    ("name", "plain", "num_steps"),
    [
        *((name, "none", 3) for name in ("pregenerate", "train_drafter", "both", "left")),
        ("both-long-killed", "none-long", 12),
    ],
)
def test_rollouts_and_policy_are_those_of_a_run_without_bubbles_and_validation(
    runs: Path, name: str, plain: str, num_steps: int
) -> None:
    expected, found = rollouts(runs / plain), rollouts(runs / name)
    assert len(expected) == num_steps * 8 * 2
    assert found == expected
    weights = policy(runs / plain)
    assert [key for key, tensor in policy(runs / name).items() if not torch.equal(tensor, weights[key])] == []
    assert [record["step"] for record in steps(runs / name)] == list(range(num_steps))


def test_two_data_parallel_ranks_train_as_one(runs: Path) -> None:
    """In FP32, up to the order in which gradients are added."""
    assert rollouts(runs / "none") == rollouts(runs / "alone")
    weights, begun = policy(runs / "alone"), load_file(runs / "policy" / "model.safetensors")
    for key, tensor in policy(runs / "none").items():
        assert float((tensor - weights[key]).norm()) <= 0.05 * float((weights[key] - begun[key]).norm()), key


def test_an_outage_of_mlflow_in_the_middle_of_a_run_leaves_no_gap(runs: Path) -> None:
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    stage = client.get_run((runs / "tracked" / "train-toy" / "mlflow_run_id").read_text().strip())
    assert stage.info.status == "FINISHED"
    rewards = [record["metrics"]["reward/mean"] for record in steps(runs / "tracked")]
    history = client.get_metric_history(stage.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == list(enumerate(rewards))
    assert len(client.list_artifacts(stage.info.run_id, "gantt")) == len(rewards) == 8


def scores(run_dir: Path) -> list[dict[str, Any]]:
    time_alone = {"seconds", "decode_steps_per_token"}
    return [score.model_dump(exclude=time_alone) for score in read_curve(run_dir / "train-toy")]


def test_the_curve_is_the_same_after_many_kills(runs: Path) -> None:
    expected = scores(runs / "both-long-validated")
    assert [(score["step"], score["set"]) for score in expected] == [
        (step, name) for step in range(0, 13, 2) for name in SETS
    ]
    assert scores(runs / "both-long-killed") == expected
    assert (
        scores(runs / "both") == [score for score in expected if score["step"] in (0, 2)] + scores(runs / "both")[-2:]
    )
    assert [(score["num_prompts"], score["k"]) for score in expected[:2]] == [(3, 4), (5, 1)]
    assert len({score["accuracy"] for score in expected}) > 1


def result(run_dir: Path) -> TrainResult:
    return read_result(run_dir / "train-toy", TrainResult)


def test_the_best_policy_is_written_with_its_drafter(runs: Path) -> None:
    expected, killed = result(runs / "both-long-validated").best, result(runs / "both-long-killed").best
    assert expected is not None and killed is not None
    assert (killed.step, killed.value) == (expected.step, expected.value)
    curve = scores(runs / "both-long-killed")
    values = {score["step"]: score["accuracy"] for score in curve if score["set"] == "sampled"}
    assert (expected.metric, expected.value) == ("validation/sampled/accuracy", max(values.values()))
    assert expected.step == min(step for step, value in values.items() if value == expected.value)
    for best, name in ((expected, "both-long-validated"), (killed, "both-long-killed")):
        assert best.policy_dir == runs / name / "train-toy" / "best" / "policy"
        assert best.drafter_dir == runs / name / "train-toy" / "best" / "drafter"
        assert (best.drafter_dir / "config.json").exists()
    found, last = load_file(killed.policy_dir / "model.safetensors"), policy(runs / "both-long-killed")
    weights = load_file(expected.policy_dir / "model.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in weights.items())
    kept = whole_state(runs / "both-long-validated" / "train-toy" / "checkpoints" / f"step={expected.step:06d}")
    names = [key for key in weights if f"master {key}" in kept]
    assert names and all(torch.equal(weights[key], kept[f"master {key}"].view_as(weights[key])) for key in names)
    assert any(not torch.equal(last[key], tensor) for key, tensor in weights.items()) == (expected.step != 12)


def test_training_that_ends_early_is_a_shorter_training(runs: Path) -> None:
    rewards = [record["metrics"]["reward/mean"] for record in steps(runs / "none-long")]
    last = next(step for step in range(3, 13) if max(rewards[step - 2 : step]) <= max(rewards[: step - 2]))
    ended = result(runs / "stopped")
    assert (ended.steps, ended.policy_step) == (last, last)
    assert ended.stopped_early is not None and ended.stopped_early.startswith("reward/mean = ")
    assert rollouts(runs / "stopped") == [row for row in rollouts(runs / "none-long") if row["step"] < last]
    assert max(score["step"] for score in scores(runs / "stopped")) == last
    kinds = [event.kind for event in read_events(runs / "stopped" / "train-toy")]
    assert [kind for kind in kinds if kind != "drafter"] == ["early stop"]  # the toy's drafter may lose its few drafts


def test_validation_is_a_part_of_the_step_that_has_it(runs: Path) -> None:
    times = [record["metrics"].get("timing/validation_s") for record in steps(runs / "both")]
    assert [seconds is not None for seconds in times] == [True, True, True]  # policies 0, 2 and 3, the last
    for record in steps(runs / "both-long-validated"):
        assert ("timing/validation_s" in record["metrics"]) == (record["step"] == 0 or record["step"] % 2 == 1)


def test_an_extended_run_is_the_beginning_of_a_longer_one(runs: Path) -> None:
    expected = [row for row in rollouts(runs / "none-long") if row["step"] < 5]
    assert rollouts(runs / "extended") == expected
    assert [record["step"] for record in steps(runs / "extended")] == list(range(5))
    assert [record["step"] for record in steps(runs / "none")] == list(range(3))
    assert len({row["step"] for row in rollouts(runs / "none")}) == 3
    linked = [runs / name / "train-toy" / "steps" / "step=000001.json" for name in ("none", "extended")]
    assert linked[0].samefile(linked[1])


def test_a_run_from_another_runs_checkpoint_begins_with_its_policy_at_step_0(runs: Path) -> None:
    start = load_file(runs / "forked" / "train-toy" / "start" / "model.safetensors")
    end = policy(runs / "none")
    assert [key for key, tensor in start.items() if not torch.equal(tensor, end[key])] == []
    rows = rollouts(runs / "forked")
    assert {row["step"] for row in rows} == {0}
    first = [row for row in rollouts(runs / "none") if row["step"] == 0]
    assert {row["seed"] for row in rows}.isdisjoint(row["seed"] for row in first)


def test_four_ranks_with_a_kill_are_four_ranks_without(runs: Path) -> None:
    assert rollouts(runs / "four-ranks-both-killed") == rollouts(runs / "four-ranks")
    weights = policy(runs / "four-ranks")
    killed = policy(runs / "four-ranks-both-killed")
    assert all(torch.equal(killed[key], tensor) for key, tensor in weights.items())
    first, same = (
        [row["response_tokens"] for row in rollouts(runs / run) if row["step"] == 0] for run in ("none", "four-ranks")
    )
    assert first == same


def test_engines_over_two_ranks_that_use_their_bubbles_are_engines_of_one_rank(runs: Path) -> None:
    """In FP32, up to the rounding of log-probs and, through them, of the policy's gradient."""
    found, expected = rollouts(runs / "tensor-parallel-both-killed"), rollouts(runs / "four-ranks")
    for row, other in zip(found, expected, strict=True):
        assert row | {"advantage": 0.0} == other | {"advantage": 0.0}
        assert row["advantage"] == pytest.approx(other["advantage"], abs=1e-6)
    weights, begun = policy(runs / "four-ranks"), load_file(runs / "policy" / "model.safetensors")
    for key, tensor in policy(runs / "tensor-parallel-both-killed").items():
        assert float((tensor - weights[key]).norm()) <= 0.05 * float((weights[key] - begun[key]).norm()), key
    for record in steps(runs / "tensor-parallel-both-killed"):
        assert "bubble/used_s" in record["metrics"]
        bubbles = [rank["bubble"] for rank in record["ranks"]]
        assert [bubble["pregenerated_tokens"] for bubble in bubbles[1::2]] == [0, 0]
        generated = ["pregeneration" in {span["name"] for span in bubble["spans"]} for bubble in bubbles]
        assert generated[::2] == generated[1::2]


def test_rewards_that_fail_cost_their_own_responses_alone(runs: Path) -> None:
    found = rollouts(runs / "failing-reward")
    assert found == rollouts(runs / "steady-reward")
    weights = policy(runs / "steady-reward")
    assert all(torch.equal(policy(runs / "failing-reward")[key], tensor) for key, tensor in weights.items())
    failed = [sum(row["reward"] == ON_FAILURE for row in found if row["step"] == step) for step in range(3)]
    assert [record["metrics"]["reward/failures"] for record in steps(runs / "failing-reward")] == failed
    assert sum(failed) > 3
    events = read_events(runs / "failing-reward" / "train-toy")
    assert [event.step for event in events if event.kind == "reward"] == [step for step in range(3) if failed[step]]
    assert "it raised ValueError: no reward for this" in " ".join(event.text for event in events)


def test_truncated_sampling_is_no_mismatch_of_engine_and_trainer(runs: Path) -> None:
    """In FP32 they agree, whatever top-p and top-k leave out and whatever the temperature is."""
    metrics = steps(runs / "truncated")[0]["metrics"]
    assert metrics["mismatch/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["mismatch/importance_ratio_max"] == pytest.approx(1.0, abs=1e-2)
    table = pyarrow.dataset.dataset(runs / "truncated" / "train-toy" / "rollouts", format="ipc").to_table()
    masses = [mass for row in table.column("log_kept_mass").to_pylist() for mass in row]
    assert min(masses) < -0.3 and max(masses) <= 0


@pytest.mark.parametrize(("run", "first_step", "num_steps"), [(MOVED, 2, 4), (MOVED_AGAIN, 3, 5)])
def test_a_run_goes_on_with_other_ranks_and_another_layout(
    runs: Path, run: LoopRun, first_step: int, num_steps: int
) -> None:
    """What is sampled is the same, and the policy is, up to the order in which its gradients are summed."""
    assert {(runs / run.name / f"ready-{rank}").read_text() for rank in range(run.ranks)} == {str(first_step)}
    expected = [row for row in rollouts(runs / "none-long") if row["step"] < num_steps]
    for left, right in zip(expected, rollouts(runs / run.name), strict=True):
        assert left | {"advantage": 0.0} == right | {"advantage": 0.0}
        assert left["advantage"] == pytest.approx(right["advantage"], abs=1e-6)
    assert [record["step"] for record in steps(runs / run.name)] == list(range(num_steps))


def test_a_damaged_checkpoint_is_an_event_of_the_run_that_goes_on_from_the_one_before(runs: Path) -> None:
    (event,) = read_events(runs / MOVED.name / "train-toy")
    assert event.kind == "damaged checkpoint" and event.step == 2
    assert "step=000003 is damaged and not used: policy-00000.safetensors has" in event.text


def test_a_policy_that_moved_twice_is_the_one_that_never_did(runs: Path) -> None:
    begun = load_file(runs / "policy" / "model.safetensors")
    stayed, moved = (
        whole_state(runs / name / "train-toy" / "checkpoints" / "step=000005")
        for name in ("none-long", MOVED_AGAIN.name)
    )
    distance = difference = 0.0
    for name, tensor in begun.items():
        found = stayed[f"master {name}"]
        distance += float((found - tensor.view_as(found)).square().sum())
        difference += float((found - moved[f"master {name}"]).square().sum())
    assert 0 < difference < 1e-8 * distance


def test_a_job_that_has_time_for_one_step_leaves_after_it_with_a_checkpoint(runs: Path) -> None:
    assert json.loads((runs / "left" / "outcome.json").read_text())["num_starts"] == 3


def test_ten_ranks_were_killed_and_every_kill_cost_one_start(runs: Path) -> None:
    outcomes = [
        json.loads((runs / name / "outcome.json").read_text())
        for name in ("both-long-killed", "four-ranks-both-killed")
    ]
    assert [len(outcome["kills"]) for outcome in outcomes] == [NUM_KILLS, NUM_KILLS_OF_FOUR]
    assert [outcome["num_starts"] for outcome in outcomes] == [NUM_KILLS + 1, NUM_KILLS_OF_FOUR + 1]


def test_idle_ranks_did_what_they_were_asked_to(runs: Path) -> None:
    made = {name: [record["metrics"] for record in steps(runs / name)] for name in NAMES}
    for name in ("pregenerate", "both"):
        assert sum(row["bubble/pregenerated_tokens"] for row in made[name]) > 0
    for name in ("train_drafter", "both"):  # from the second step on, as the first one leaves what is learned from
        assert [row["bubble/drafter_steps"] > 0 for row in made[name]] == [False, True, True]
    assert all(row["bubble/used_s"] == 0 for row in made["none"]) and sum(row["bubble/idle_s"] for row in made["none"])
    assert all(row["bubble/used_s"] <= row["bubble/idle_s"] for rows in made.values() for row in rows)


def test_what_was_generated_ahead_in_the_last_step_is_kept_for_validation(runs: Path) -> None:
    for name in ("pregenerate", "both"):
        texts = [text for path in runs.glob(f"{name}/train-toy/next_step/*.arrow") for text in read_texts(path)]
        made = steps(runs / name)[-1]["metrics"]["bubble/pregenerated_tokens"]
        assert sum(len(text.tokens) for text in texts) == made
    assert not [text for path in runs.glob("none/train-toy/next_step/*.arrow") for text in read_texts(path)]


def test_validation_measures_the_step_that_would_come_next_with_its_text(runs: Path) -> None:
    found = json.loads((runs / "both" / "pairs.json").read_text())
    rows = rollouts(runs / "both")
    assert (found["text"]["step"], found["text"]["num_responses"]) == (3, 16)
    assert 0 < found["text"]["num_recent"] < len(rows)  # those of one of the two engines
    assert [pair["batch"] for pair in found["pairs"]] == [2, 8]
    for pair in found["pairs"]:
        assert pair["tokens_equal"] == 1.0
        assert set(pair["token_share"]) <= {"drafter", "continued", "recent", "replay", "own"}
        assert 0 < sum(pair["token_share"].values()) < 1


def test_text_of_the_same_seeds_is_sampled_again(runs: Path) -> None:
    """How often depends on the policy's steps, which are large for a toy, and on how much idle time there was."""

    def accepted(*names: str) -> float:
        records = [record for name in names for record in steps(runs / name)]
        counts = [record["stats"]["by_source"].get("replay", [0, 0, 0]) for record in records]
        return sum(row[2] for row in counts) / max(1, sum(row[1] for row in counts))

    assert accepted("pregenerate", "both", "both-long-killed") > 0.15


def test_a_response_that_has_the_text_of_its_own_seed_is_that_text(runs: Path) -> None:
    columns = ["response_tokens", "own_stored_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens"]
    columns.append("finish_reason")

    def whole_rows(*names: str) -> list[dict[str, Any]]:
        folders = [runs / name / "train-toy" / "rollouts" for name in names]
        tables = [pyarrow.dataset.dataset(folder, format="ipc").to_table(columns=columns) for folder in folders]
        rows = [row for table in tables for row in table.to_pylist()]
        return [row for row in rows if row["own_stored_tokens"] >= len(row["response_tokens"])]

    drafting = whole_rows("pregenerate", "both")
    accepted = sum(row["num_accepted_tokens"] for row in drafting)
    assert accepted > 0.8 * sum(row["num_draft_tokens"] for row in drafting) > 0
    whole = [*drafting, *whole_rows("both-long-killed")]
    drafted = sum(row["num_draft_tokens"] for row in whole)
    # A stop token within a draft ends the response and counts as sampled; responses of two tokens have nothing else.
    stopped = sum(row["finish_reason"] == "stop" and row["num_drafts"] > 0 for row in whole)
    assert sum(row["num_accepted_tokens"] for row in whole) + stopped > 0.85 * drafted > 0


def test_the_simulator_needs_as_many_decoding_steps(runs: Path) -> None:
    """With every engine's own responses, each at the tokens per iteration that it had."""
    records, simulated = steps(runs / "none"), []
    for record in records:
        shares: dict[int, list[SimulatedResponse]] = {}
        for row in read_folder(runs / "none" / "train-toy" / "rollouts" / f"step={record['step']:06d}"):
            length = len(row.response_tokens)
            pace = length / max(1, length - row.num_accepted_tokens)
            shares.setdefault(row.rank, []).append(SimulatedResponse(row.prompt_id, length, pace, row.sample))
        speed = DecodingSpeed(lambda running, generated: 1.0)
        simulated.append(simulate([list(shares.values())], speed, "none", most_running=16)[0].iterations)
    measured = sum(record["metrics"]["spec/decode_steps"] for record in records)
    assert sum(simulated) == pytest.approx(measured, rel=0.1)


def test_every_step_left_its_picture(runs: Path) -> None:
    pictures = sorted((runs / "both" / "train-toy" / "steps").glob("*.svg"))
    assert len(pictures) == 3
    assert "rank 1" in pictures[0].read_text()


def test_a_step_logs_every_metric_that_is_defined_for_it_and_no_other(runs: Path) -> None:
    names = "every-metric", "pregenerate", "both", "both-long-killed"
    logged = {name for run in names for record in steps(runs / run) for name in record["metrics"]}
    assert [name for name in logged if find_metric(name) is None] == []
    families = {metric.name for name in logged if (metric := find_metric(name)) is not None}
    expected = {name for name in METRICS if name.partition("/")[0] in OF_A_STEP}
    experts = {"mismatch/routing_tokens", "mismatch/routing_layers"}  # see test_expert_steps.py
    conversations = {"rollout/turns_mean"}  # see test_conversations.py
    distillation = {"policy/teacher_kl"}  # see test_distillation.py
    assert expected - families == experts | conversations | distillation


def test_no_drafter_collapses_that_is_not_trained_in_idle_time(runs: Path) -> None:
    """How far one trains in idle time depends on the machine, and so does whether its drafts suit the probe."""
    for name in ("none", "pregenerate", "four-ranks"):
        assert not any(record["events"] for record in steps(runs / name))
