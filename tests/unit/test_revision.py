"""What a change means for each stage of a run whose stages have got so far."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specrl.artifacts import PrepareResult, read_result, write_json, write_text
from specrl.config import STAGES, Config, ConfigError, StageName, change_config, dump_config, parse_config
from specrl.events import read_events, record_event
from specrl.keys import run_keys
from specrl.lineage.history import adopt_history, begin_continuation
from specrl.lineage.record import Continuation, RunRecord, read_record, write_record
from specrl.lineage.revision import Revision, adjustable_keys, config_changes

CONFIG = parse_config({"name": "run", "train": {"num_steps": 4}})


def make_run(folder: Path, finished: tuple[StageName, ...], step: int | None, config: Config = CONFIG) -> RunRecord:
    """A run's folder with finished stages, and a checkpoint of its train stage."""
    record = RunRecord(
        settings=json.loads(dump_config(config)), code="0" * 12, files={}, stage_keys=run_keys(config, "code")
    )
    write_record(folder, record)
    for stage in finished:
        write_json(folder / "stages" / record.stage_keys[stage] / "result.json", {})
    if step is not None:
        checkpoint = folder / "stages" / record.stage_keys["train"] / "checkpoints" / f"step={step:06d}"
        write_json(checkpoint / "manifest.json", {"files": []})
    return record


def add_checkpoint(stage_dir: Path, step: int, *, size: int = 4) -> Path:
    """A checkpoint of one file with 4 bytes, whose manifest says how many it should have."""
    folder = stage_dir / "checkpoints" / f"step={step:06d}"
    write_text(folder / "policy", "1234")
    write_json(folder / "manifest.json", {"files": [{"name": "policy", "size": size}]})
    return folder


def change(
    folder: Path, *overrides: str, code: str = "code", restart: bool = False, config: Config = CONFIG
) -> Revision:
    record = read_record(folder)
    assert record is not None
    new = change_config(config, list(overrides))
    update = record.model_copy(update={"settings": json.loads(dump_config(new))})
    changes = config_changes(config, new)
    return Revision(folder, update, config, new, changes, code, new_code=code != "code", restart=restart)


def actions(revision: Revision) -> dict[StageName, str]:
    return {plan.stage: plan.action for plan in revision.stages}


ALL = dict.fromkeys(STAGES, "stays")
AFTER_TRAIN = {"train": "continues", "validate": "is redone", "export": "is redone"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.num_steps=6", ALL | AFTER_TRAIN),
        ("policy.lr=1e-6", ALL | AFTER_TRAIN),
        ("data.reward='exact_match'", ALL | AFTER_TRAIN),
        ("speculation.method='eagle3+replay'", ALL | AFTER_TRAIN),
        ("train.advantage=rloo", ALL | AFTER_TRAIN),
        ("validate.num_prompts=3", ALL | {"validate": "is redone", "export": "is redone"}),
        ("validate.every=2", ALL | AFTER_TRAIN),
        ("resources.minutes=3", ALL),
        ("cluster.backend='slurm'", ALL),
        ("precision.max_token_mult_prob_error=2.0", ALL | AFTER_TRAIN),
    ],
)
def test_a_finished_run_goes_on_from_its_last_checkpoint(
    override: str, expected: dict[StageName, str], tmp_path: Path
) -> None:
    record = make_run(tmp_path, STAGES, step=4)
    revision = change(tmp_path, override)
    assert actions(revision) == expected
    kept = [stage for stage in STAGES if revision.record.stage_keys[stage] == record.stage_keys[stage]]
    assert kept == [stage for stage in STAGES if expected[stage] == "stays"]
    if expected["train"] == "continues":
        start = revision.record.continues
        assert start is not None
        assert (start.key, start.step, start.counts_on) == (record.stage_keys["train"], 4, True)
    else:
        assert revision.record.continues is None


def test_a_setting_of_the_last_stages_may_change_along_with_one_of_training(tmp_path: Path) -> None:
    make_run(tmp_path, STAGES, step=4)
    revision = change(tmp_path, "policy.lr=1e-6", "validate.speed_batches=[1]", "resources.minutes=3")
    assert actions(revision) == ALL | AFTER_TRAIN
    assert revision.events == [("settings", "policy.lr = 1e-05 -> 1e-06")]


@pytest.mark.parametrize("override", ["model.dtype='float32'", "seed=3", "drafter.epochs=1", "precision.max_kl=0.1"])
def test_other_settings_make_training_start_over_and_are_refused(override: str, tmp_path: Path) -> None:
    make_run(tmp_path, STAGES, step=4)
    with pytest.raises(ConfigError, match=r"would start over, without the 4 steps of train-.*--restart") as refused:
        change(tmp_path, override)
    assert override.partition("=")[0] in str(refused.value) or "is redone" in str(refused.value)
    assert "\n" not in str(refused.value)
    revision = change(tmp_path, override, restart=True)
    assert actions(revision)["train"] == "starts over"
    assert revision.record.continues is None


def test_the_prompts_of_all_steps_are_counted_over_changes_of_their_number(tmp_path: Path) -> None:
    record = make_run(tmp_path, STAGES, step=4)
    start = change(tmp_path, "train.prompts_per_step=32").record.continues
    assert start is not None
    assert start.num_prompts == 4 * CONFIG.train.prompts_per_step
    write_record(tmp_path, record.model_copy(update={"continues": start.model_copy(update={"step": 3})}))
    again = change(tmp_path, "train.prompts_per_step=8").record.continues
    assert again is not None
    assert again.num_prompts == start.num_prompts + CONFIG.train.prompts_per_step


def test_other_code_runs_only_what_has_not_finished(tmp_path: Path) -> None:
    make_run(tmp_path, ("prepare", "pretrain", "calibrate"), step=2)
    revision = change(tmp_path, code="edited")
    assert actions(revision) == ALL | {"train": "continues", "validate": "runs", "export": "runs"}
    assert revision.events == [("code", f"code {'0' * 12}")]


def test_other_code_leaves_a_finished_run_as_it_is(tmp_path: Path) -> None:
    record = make_run(tmp_path, STAGES, step=4)
    assert change(tmp_path, code="edited").record.stage_keys == record.stage_keys


def test_a_drafter_that_nobody_pretrained_makes_training_start_over(tmp_path: Path) -> None:
    make_run(tmp_path, STAGES, step=4)
    assert actions(change(tmp_path, "speculation.method='ngram'"))["train"] == "continues"
    with pytest.raises(ConfigError, match=r"speculation.method changes"):
        change(tmp_path, "speculation.method='mtp'")


def test_a_method_that_takes_the_drafter_of_the_source_has_prepare_write_it(tmp_path: Path) -> None:
    config = parse_config({"name": "run", "speculation": {"method": "ngram"}, "drafter": {"source": "a/b"}})
    record = make_run(tmp_path, STAGES, step=None, config=config)
    revision = change(tmp_path, "speculation.method='eagle3'", restart=True, config=config)
    assert actions(revision)["prepare"] == "is redone"
    assert revision.record.stage_keys["prepare"] != record.stage_keys["prepare"]
    assert actions(change(tmp_path, "speculation.method='replay'", config=config))["prepare"] == "stays"


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    record = make_run(tmp_path, STAGES, step=None)
    train = tmp_path / "stages" / record.stage_keys["train"]
    add_checkpoint(train, 2)
    add_checkpoint(train, 3, size=5)
    (add_checkpoint(train, 4) / "policy").unlink()
    start = change(tmp_path, "train.num_steps=6").record.continues
    assert start is not None
    assert (start.step, start.num_prompts) == (2, 2 * CONFIG.train.prompts_per_step)


def continue_step_4(folder: Path) -> tuple[RunRecord, Path]:
    """A run whose training is to go on from step 4 of another stage, and has not got so far as a checkpoint."""
    record = make_run(folder, ("prepare", "pretrain", "calibrate"), step=None)
    record = record.model_copy(update={"stage_keys": {**record.stage_keys, "train": "train-after"}})
    old = Path("stages") / "train-before"
    start = Continuation(run="run", key=old.name, step=4, stage_dir=old, counts_on=True, num_prompts=64)
    write_record(folder, record.model_copy(update={"continues": start}))
    return record, folder / old


def test_a_stuck_continuation_goes_on_from_an_earlier_checkpoint(tmp_path: Path) -> None:
    record, old = continue_step_4(tmp_path)
    add_checkpoint(old, 4)
    assert actions(change(tmp_path))["train"] == "goes on"
    add_checkpoint(old, 3)
    (old / "checkpoints" / "step=000004" / "policy").unlink()
    for overrides in ([], ["policy.lr=1e-6"]):
        revision = change(tmp_path, *overrides)
        assert actions(revision)["train"] == "continues"
        start = revision.record.continues
        assert start is not None
        assert (start.key, start.step, start.num_prompts) == ("train-before", 3, 48)
        assert revision.record.stage_keys["train"] != record.stage_keys["train"]


def test_training_whose_checkpoints_are_gone_starts_over_only_when_told_to(tmp_path: Path) -> None:
    record, _ = continue_step_4(tmp_path)
    for overrides in ([], ["train.num_steps=6"]):
        with pytest.raises(ConfigError, match=r"4 steps, but has no checkpoint left and would start over: .*--restart"):
            change(tmp_path, *overrides)
    revision = change(tmp_path, restart=True)
    assert actions(revision)["train"] == "starts over"
    assert revision.record.continues is None
    assert revision.record.stage_keys["train"] != record.stage_keys["train"]

    write_record(tmp_path, record)  # as if it had begun at the first step, and finished
    train = tmp_path / "stages" / record.stage_keys["train"]
    write_json(train / "result.json", {})
    write_json(train / "steps" / "step=000003.json", {})
    assert actions(change(tmp_path))["train"] == "stays"
    with pytest.raises(ConfigError, match=r"has made 4 steps, but has no checkpoint left"):
        change(tmp_path, "train.num_steps=6")
    assert actions(change(tmp_path, "train.num_steps=6", restart=True))["train"] == "starts over"


def test_a_fork_whose_checkpoints_are_gone_starts_over_from_its_origin(tmp_path: Path) -> None:
    continue_step_4(tmp_path)
    origin = Continuation(run="other", key="train-0", step=9, stage_dir=Path("origin"), counts_on=False)
    present = read_record(tmp_path)
    assert present is not None
    write_record(tmp_path, present.model_copy(update={"origin": origin}))
    assert change(tmp_path, "train.num_steps=6", restart=True).record.continues == origin


def test_steps_that_are_made_cannot_be_taken_back(tmp_path: Path) -> None:
    make_run(tmp_path, STAGES, step=4)
    with pytest.raises(ConfigError, match=r"train.num_steps = 3: .* 4 steps; allowed: 4 or more"):
        change(tmp_path, "train.num_steps=3")


def test_a_run_without_a_checkpoint_begins_with_the_new_settings(tmp_path: Path) -> None:
    make_run(tmp_path, ("prepare",), step=None)
    revision = change(tmp_path, "policy.lr=1e-6")
    assert actions(revision) == {
        "prepare": "stays", "pretrain": "goes on", "calibrate": "runs", "train": "runs", "validate": "runs",
        "export": "runs",
    }  # fmt: skip
    assert revision.record.continues is None


def test_a_continuation_has_the_whole_history_and_leaves_the_other_alone(tmp_path: Path) -> None:
    old, new = tmp_path / "stages" / "train-0", tmp_path / "stages" / "train-1"
    for step in range(3):
        for name in (
            f"steps/step={step:06d}.json",
            f"steps/step={step:06d}.svg",
            f"rollouts/step={step:06d}/rank-0000.arrow",
        ):
            (old / name).parent.mkdir(parents=True, exist_ok=True)
            (old / name).write_text(str(step))
    record_event(old, "restart", "it was killed", 1)
    start = Continuation(run="run", key="train-0", step=2, stage_dir=old, counts_on=True)
    for _ in range(2):  # a call that was killed is made again
        begin_continuation(new, old, 2, [("settings", "policy.lr = 1 -> 2")])
        adopt_history(new, start)
    assert sorted(path.name for path in (new / "rollouts").iterdir()) == ["step=000000", "step=000001"]
    assert len(list((new / "steps").iterdir())) == 4
    assert [(event.kind, event.step) for event in read_events(new)] == [("restart", 1), ("settings", 2)]
    assert len(read_events(old)) == 1
    shutil.rmtree(new)
    assert len(list(old.rglob("step=*"))) == 9


def test_the_guide_lists_every_setting_that_may_change() -> None:
    lines = (Path(__file__).parents[2] / "docs/guides/resume.md").read_text().splitlines()
    listed = [
        f"{section.strip(' `')}.{name.strip(' `')}"
        for line in lines[lines.index("| section | settings |") + 2 :]
        if line.startswith("| `")
        for section, names in [line.strip("|").split("|")]
        for name in names.split(",")
    ]
    assert listed[: len(adjustable_keys())] == adjustable_keys()


def test_what_only_other_code_knew_of_a_result_is_left_out(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", {"policy_dir": "policy", "seconds": 1.0, "of_other_code": 2})
    assert read_result(tmp_path, PrepareResult).policy_dir == Path("policy")
    write_json(tmp_path / "result.json", {"seconds": 1.0})
    with pytest.raises(ValueError, match="is not a PrepareResult of this version"):
        read_result(tmp_path, PrepareResult)


def test_a_record_of_another_version_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"code": "0"}')
    with pytest.raises(ConfigError, match="specrl resume"):
        read_record(tmp_path)
