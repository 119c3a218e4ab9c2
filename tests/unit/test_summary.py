"""summary.json is a contract; the table and the page show what is there, finished or not."""

from __future__ import annotations

import json
import re
import shlex
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from specrl.artifacts import (
    BestPolicy,
    CalibrateResult,
    ExactnessResult,
    ExportResult,
    NextStepText,
    ParityCounts,
    PrecisionReport,
    PrepareResult,
    PretrainResult,
    SpeedPair,
    TrainResult,
    ValidateResult,
    read_result,
    write_json,
    write_result,
    write_scores,
    write_text,
)
from specrl.config import STAGES, dump_config, parse_config
from specrl.events import record_event
from specrl.lifetime.segments import add_to_segment, begin_segment
from specrl.report.html import read_columns, write_report
from specrl.report.plots import line_chart
from specrl.report.results import find_stages, read_config
from specrl.report.summary import describe, render_summary, write_summary
from specrl.schemas import Rollout, rollout_path, write_rollouts
from specrl.validation.scores import SetResponses, score_set

SPEED = [
    SpeedPair(
        batch=batch,
        plain_tokens_per_s=40.0 * batch,
        speculative_tokens_per_s=40.0 * batch * ratio,
        speedup=ratio,
        speedup_min=ratio - 0.1,
        speedup_max=ratio + 0.1,
        decode_step_reduction=0.6,
        tokens_equal=1.0,
    )
    for batch, ratio in ((1, 1.9), (4, 1.5), (16, 0.97))
]


TRAIN_KEY = "train-0123456789ab"


def make_run(tmp_path: Path, finished: tuple[str, ...] = STAGES) -> tuple[Path, dict[str, Path]]:
    """A run's folder as the stages leave it, with the given stages finished."""
    config = parse_config({"name": "demo", "runs_dir": str(tmp_path)})
    run_dir = config.run_dir
    write_text(run_dir / "config.json", dump_config(config))
    results = {
        "prepare": PrepareResult(policy_dir=run_dir / "policy", seconds=10.0),
        "pretrain": PretrainResult(
            drafter_dir=run_dir / "d", rollouts_dir=run_dir / "r", num_responses=8, reward_mean=0.5, seconds=20.0
        ),
        "calibrate": CalibrateResult(
            scales_path=run_dir / "s",
            layers_path=run_dir / "l",
            bf16_layers=[],
            kl_all_fp8=0.01,
            kl_chosen=0.001,
            seconds=5.0,
        ),
        "train": TrainResult(
            policy_dir=run_dir / "policy",
            drafter_dir=run_dir / "drafter",
            policy_step=8,
            steps=8,
            best=BEST,
            stopped_early="reward/mean = 0.9 after step 8 is above 0.8",
            step_seconds_median=30.5,
            timing_share={"generation": 0.6, "policy_update": 0.3, "refit": 0.1},
            reward_first=0.31,
            reward_last=0.52,
            reward_parts={"math_verify": (0.25, 0.5), "form": (0.9, 1.0)},
            acceptance_length=2.5,
            acceptance_rate_per_pos=[0.6, 0.5, 0.4],
            mismatch={"token_mult_prob_error": 1.02},
            refit_checks=16,
            refit_failures=0,
            refit_max_abs_logprob_diff=0.03,
            drafter_events=["drafter collapse after refit 3: gone; reloaded its last good version"],
            seconds=240.0,
        ),
        "validate": ValidateResult(
            accuracy_before=0.3,
            accuracy_after=0.5,
            num_prompts=128,
            acceptance_length=2.7,
            acceptance_rate_per_pos=[0.7, 0.6, 0.4],
            speed=SPEED,
            exactness=EXACTNESS,
            seconds=60.0,
        ),
        "export": ExportResult(
            policy_dir=run_dir / "export" / "a policy",
            drafter_dir=run_dir / "export" / "drafter",
            vllm_acceptance_length=2.68,
            seconds=15.0,
        ),
    }
    stages = {}
    for stage in finished:
        folder = run_dir / "stages" / f"{stage}-0123456789ab"
        write_result(folder, results[stage])
        stages[stage] = folder
    return run_dir, stages


BEST = BestPolicy(
    step=6, metric="validation/held-out/accuracy", value=0.625, policy_dir=Path("best/policy"), drafter_dir=None
)
EXACTNESS = ExactnessResult(
    num_draft_tokens=700,
    num_accepted_tokens=400,
    sampled=ParityCounts(
        num_responses=16,
        num_tokens=1024,
        num_differences=1,
        num_unexplained=0,
        lead_noise=0.004,
        limit=0.03125,
        largest_distance=0.0021,
    ),
    greedy=ParityCounts(
        num_responses=16,
        num_tokens=990,
        num_differences=0,
        num_unexplained=0,
        lead_noise=0.004,
        limit=0.12,
        largest_distance=0.0,
    ),
)


def shown(run_dir: Path) -> str:
    text = StringIO()
    render_summary(run_dir, Console(file=text))
    return text.getvalue()


def test_the_summary_has_exactly_the_keys_of_the_contract(tmp_path: Path) -> None:
    run_dir, stages = make_run(tmp_path)
    record_event(stages["train"], "settings", "policy.lr = 1e-05 -> 2e-05", 3)
    summary = json.loads(write_summary(run_dir, "abc").read_text())
    [event] = summary.pop("events")
    assert [event[name] for name in ("stage", "step", "kind", "text")] == [
        *("train", 3, "settings", "policy.lr = 1e-05 -> 2e-05")
    ]
    assert {name: sorted(value) if isinstance(value, dict) else value for name, value in summary.items()} == {
        "run": "demo",
        "mlflow_run_id": "abc",
        "stages": sorted(STAGES),
        "segments": sorted(STAGES),
        "validation": ["accuracy_after", "accuracy_before", "curve", "exactness", "num_prompts"],
        "speculation": [
            "acceptance_length",
            "acceptance_rate_per_pos",
            "decode_step_reduction",
            "generation_speedup",
            "k",
            "method",
            "text",
            "token_share",
        ],
        "data": ["prompts_overlong", "prompts_seen"],
        "best": ["metric", "policy_dir", "step", "value"],
        "train": [
            "reward_first",
            "reward_last",
            "reward_parts",
            "step_seconds_median",
            "steps",
            "timing_share",
        ],
        "mismatch": ["token_mult_prob_error"],
        "precision": sorted(PrecisionReport.model_fields),
        "refit": ["checks", "drafter_events", "failures", "max_abs_logprob_diff"],
        "export": ["drafter_dir", "model_version", "vllm_acceptance_length"],
    }
    assert summary["speculation"]["generation_speedup"] == {"1": 1.9, "4": 1.5, "16": 0.97}
    assert summary["speculation"]["decode_step_reduction"] == pytest.approx(0.6)
    assert summary["stages"]["train"] == {"key": "train-0123456789ab", "seconds": 240.0, "job_id": None}


def test_the_curve_of_validation_is_shown_while_the_policy_is_trained(tmp_path: Path) -> None:
    run_dir, _ = make_run(tmp_path, STAGES[:3])
    for step, rewards in ((0, [[0.0, 0.0], [1.0, 0.0]]), (4, [[1.0, 1.0], [1.0, 0.0]])):
        lengths = np.ones((2, 2), np.int64)
        found = score_set(step, "sums", SetResponses(np.array(rewards), lengths, lengths < 0), [1, 2], 1.0, 2.0, 1.0)
        write_scores(run_dir / "stages" / TRAIN_KEY, step, [found])
    assert "25.0% -> 75.0% at step 4 (50.0% to 100.0%; best 75.0% at step 4), pass@2 50.0% -> 100.0%" in shown(run_dir)
    summary = json.loads(write_summary(run_dir, None).read_text())
    assert summary["validation"]["accuracy_after"] is None
    first, last = summary["validation"]["curve"]
    assert sorted(first) == ["accuracy", "avg_at_k", "ci", "pass_at_k", "set", "step"]
    assert (last["step"], last["accuracy"], last["pass_at_k"]) == (4, 0.75, 1.0)
    page = write_report(run_dir).read_text()
    assert "Accuracy on held-out prompts" in page


def test_a_description_has_the_results_as_a_table_and_leads_to_the_models(tmp_path: Path) -> None:
    run_dir, _ = make_run(tmp_path, finished=("prepare", "train"))
    text = describe(run_dir)
    assert "| reward, training | 0." in text
    assert "demo-policy" not in text
    run_dir, _ = make_run(tmp_path)
    text = describe(run_dir)
    assert "| accuracy, held out | 30.0% -> 50.0% (128 prompts) |" in text
    assert "[demo-policy](#/models/demo-policy), [demo-drafter](#/models/demo-drafter)" in text
    assert "vllm serve" in text
    assert "teacher" not in text
    config = read_config(run_dir)
    taught = config.model_copy(update={"train": config.train.model_copy(update={"teacher": Path("large/model")})})
    write_text(run_dir / "config.json", dump_config(taught))
    assert f"RL post-training of `{config.model.source}` with the teacher `large/model` on" in describe(run_dir)


def test_the_accuracy_on_every_set_is_shown(tmp_path: Path) -> None:
    run_dir, stages = make_run(tmp_path)
    lengths = np.ones((2, 1), np.int64)
    found = [
        score_set(8, name, SetResponses(np.array([[1.0], [reward]]), lengths, lengths < 0), [1], 1.0, 2.0, 1.0)
        for name, reward in (("first", 0.0), ("second", 0.0), ("second", 1.0))
    ]
    result = read_result(stages["validate"], ValidateResult)
    sets = {"before": found[:2], "after": [found[0], found[2]]}
    write_result(stages["validate"], result.model_copy(update=sets))
    text = shown(run_dir)
    assert "50.0% -> 100.0% (2 prompts)" in text
    assert "accuracy, second" in text and "accuracy, first" not in text


def test_the_sources_of_accepted_drafts_are_shown_where_text_is_drafted_from(tmp_path: Path) -> None:
    run_dir, stages = make_run(tmp_path)
    assert "accepted drafts" not in shown(run_dir)
    result = read_result(stages["validate"], ValidateResult)
    shares = {"drafter": 0.1, "replay": 0.45, "my source": 0.02}
    text = NextStepText(step=8, num_responses=128, num_stored=1, stored_tokens=9, num_recent=50, recent_tokens=700)
    changed = {"speed": [SPEED[0].model_copy(update={"token_share": shares})], "text": text}
    write_result(stages["validate"], result.model_copy(update=changed))
    found = shown(run_dir)
    assert "of all tokens, 45% stored for the prompt, 10% the drafter's, 2% my source" in found
    assert "text that step 8 would find" in found
    assert "1 pre-generated response (9 tokens) for its 128, 50 recent rollouts (700 tokens)" in found
    summary = json.loads(write_summary(run_dir, None).read_text())
    assert summary["speculation"]["token_share"] == {"1": shares}
    assert summary["speculation"]["text"]["num_stored"] == 1


def test_job_ids_and_seconds_come_from_the_folder(tmp_path: Path) -> None:
    run_dir, stages = make_run(tmp_path)
    write_json(run_dir / "jobs" / f"{stages['train'].name}.json", {"job_id": 42})
    write_json(run_dir / "jobs" / f"{stages['export'].name}.json", {"job_id": "7"})
    exported = read_result(stages["export"], ExportResult)
    write_result(stages["export"], exported.model_copy(update={"seconds": 99.0}))
    summary = json.loads(write_summary(run_dir, None).read_text())
    assert summary["stages"]["train"]["job_id"] == "42"
    assert (summary["stages"]["export"]["seconds"], summary["stages"]["export"]["job_id"]) == (99.0, "7")


def test_the_jobs_of_a_stage_are_counted_with_their_reasons(tmp_path: Path) -> None:
    run_dir, stages = make_run(tmp_path)
    for reason in ("preempted", "hang", "finished"):
        number = begin_segment(stages["train"], "42", "node1").number
        add_to_segment(stages["train"], number, reason=reason)
    summary = json.loads(write_summary(run_dir, None).read_text())
    assert summary["segments"]["train"] == {"number": 3, "reasons": ["preempted", "hang", "finished"]}
    assert summary["segments"]["export"] == {"number": 0, "reasons": []}
    assert "(3 times: preempted, hang, finished)" in shown(run_dir)


def test_the_table_shows_what_a_run_reached(tmp_path: Path) -> None:
    run_dir, _ = make_run(tmp_path)
    write_summary(run_dir, None)
    text = shown(run_dir)
    assert "\x1b" not in text
    for part in (
        "30.0% -> 50.0% (128 prompts)",
        "step 6, validation/held-out/accuracy 0.625: best/policy",
        "ended early: reward/mean = 0.9 after step 8 is above 0.8",
        "2.70",
        "1.90x",
        "0.97x",
        "16 checks, 0 failures",
        "69%",
        "60.0%",
        "1 difference in 1024",
        "all near-ties: largest distance 0.0021 nats, limit 0.031",
        "400 of 700 drafted tokens accepted",
        "reloaded its last",
    ):
        assert part in text
    assert f"drafter: {run_dir}/export/drafter" in text


def test_the_serve_command_is_one_line_that_a_shell_reads_back(tmp_path: Path) -> None:
    run_dir, _ = make_run(tmp_path)
    [line] = [line for line in shown(run_dir).splitlines() if "vllm serve" in line]
    command = shlex.split(line)
    assert command[:4] == ["vllm", "serve", f"{run_dir}/export/a policy", "--speculative-config"]
    assert json.loads(command[4]) == {
        "method": "eagle3",
        "model": f"{run_dir}/export/drafter",
        "num_speculative_tokens": 3,
    }
    on_cpus = ["--kv-cache-memory-bytes", str(2**30), "--enforce-eager"]
    assert command[5:] == ["--dtype", "bfloat16", "--max-model-len", "512", *on_cpus]


@pytest.mark.parametrize("count", range(len(STAGES)))
def test_a_run_in_progress_is_shown_as_far_as_it_got(tmp_path: Path, count: int) -> None:
    run_dir, _ = make_run(tmp_path, STAGES[:count])
    for step in range(3):
        write_rollouts(rollout_path(run_dir / "stages" / TRAIN_KEY / "rollouts", step, 0), [])
    text = shown(run_dir)
    assert ", ".join(STAGES[count:]) in text
    assert ("3 of 8 steps" in text) == (count <= STAGES.index("train"))
    summary = json.loads(write_summary(run_dir, None).read_text())
    assert (summary["train"] is None) == (count <= STAGES.index("train"))
    assert shown(run_dir)
    assert write_report(run_dir).exists()


def test_a_folder_that_is_no_run_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the folder of a run"):
        describe(tmp_path)


def test_the_newest_folder_of_a_stage_counts(tmp_path: Path) -> None:
    run_dir, _ = make_run(tmp_path)
    older = run_dir / "stages" / "train-0123456789ab"
    newer = run_dir / "stages" / "train-ffffffffffff"
    newer.mkdir()
    stamp = older.stat().st_mtime + 10
    import os

    os.utime(newer, (stamp, stamp))
    assert find_stages(run_dir)["train"].name == "train-ffffffffffff"


def rollout(step: int, reward: float, length: int) -> Rollout:
    return Rollout(
        step=step,
        rank=0,
        prompt_id=1,
        sample=0,
        policy_version=step,
        drafter_version=step,
        seed=3,
        prompt_tokens=[1, 2],
        response_tokens=list(range(length)),
        generation_logprobs=[0.0] * length,
        response="x",
        answer="y",
        finish_reason="stop",
        reward=reward,
    )


def test_the_page_draws_rollouts_and_results_and_needs_nothing_else(tmp_path: Path) -> None:
    run_dir, _ = make_run(tmp_path)
    for step in range(3):
        rows = [rollout(step, step / 4, 5 + step), rollout(step, step / 2, 9)]
        write_rollouts(rollout_path(run_dir / "stages" / TRAIN_KEY / "rollouts", step, 0), rows)
    steps, rewards, lengths = read_columns(run_dir / "stages" / TRAIN_KEY / "rollouts")
    assert steps.tolist() == [0, 0, 1, 1, 2, 2]
    assert rewards.tolist() == [0.0, 0.0, 0.25, 0.5, 0.5, 1.0]
    assert lengths.tolist() == [5, 9, 6, 9, 7, 9]
    record_event(run_dir / "stages" / TRAIN_KEY, "settings", "policy.lr = 1e-05 -> 2e-05", 2)
    record_event(run_dir / "stages" / TRAIN_KEY, "restart", "outside any step")
    page = write_report(run_dir).read_text()
    assert page.count("<svg") == 3
    assert "policy.lr = 1e-05 -&gt; 2e-05" in page
    assert '<td>generation</td><td class="number">60.0%</td>' in page
    assert not any(word in page for word in ("<script", "http:", "https:", "src="))
    assert "<strong>30% \u2192 50%</strong> <span>accuracy on 128 held-out prompts</span>" in page
    assert "<td>accuracy, held out</td><td>30.0% -&gt; 50.0% (128 prompts)</td>" in page
    assert '<td>train</td><td class="number">240</td>' in page
    assert '<td>train</td><td class="number">2</td><td>settings</td>' in page
    assert '<td>train</td><td class="number"></td><td>restart</td>' in page
    assert "<pre>" not in page and "vllm serve" in page


@pytest.mark.parametrize("value", [0.7, 0.0, -2.0])
def test_a_chart_of_one_point_has_one_whole_tick(value: float) -> None:
    [x, label, *ticks, y] = re.findall(r"<text[^>]*>([^<]*)</text>", line_chart({"": [(1, value)]}, "batch", "speed"))
    assert (x, label, y) == ("1", "batch", "speed") and len(ticks) > 3
