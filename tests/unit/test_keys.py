from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from specrl.config import STAGES, Config, StageName, parse_config
from specrl.keys import INPUTS, SECTIONS, code_digest, model_fingerprint, reward_sources, run_keys

NO_CONTENT = {"name", "runs_dir", "resources", "stage_resources", "cluster", "tracking"}
"""The sections that say where and how a stage runs and not what it computes."""


def config_with(**sections: Any) -> Config:
    return parse_config({"name": "run", **sections})


def changed(before: Config, after: Config) -> set[StageName]:
    first, second = run_keys(before, "code"), run_keys(after, "code")
    return {stage for stage in STAGES if first[stage] != second[stage]}


def test_keys_name_their_stage_and_are_the_same_each_time() -> None:
    keys = run_keys(config_with(), "code")
    assert list(keys) == list(STAGES)
    assert all(key.startswith(f"{stage}-") and len(key) == len(stage) + 13 for stage, key in keys.items())
    assert keys == run_keys(config_with(), "code")


def test_every_section_is_content_of_some_stage_or_of_none() -> None:
    used = {section for sections in SECTIONS.values() for section in sections}
    known = {field.alias or name for name, field in Config.model_fields.items()}
    assert used | NO_CONTENT == known
    assert not used & NO_CONTENT


def test_where_a_run_lies_and_runs_changes_no_key(tmp_path: Path) -> None:
    moved = parse_config(
        {
            "name": "other",
            "runs_dir": str(tmp_path),
            "resources": {"cpus_per_rank": 7},
            "cluster": {"backend": "slurm", "partition": "gpu"},
            "tracking": {"experiment": "x"},
        }
    )
    assert changed(config_with(), moved) == set()


@pytest.mark.parametrize(
    ("section", "stages"),
    [
        ({"train": {"num_steps": 3}}, {"train", "validate", "export"}),
        ({"validate": {"num_prompts": 3}}, {"validate", "export"}),
        ({"precision": {"max_kl": 0.1}}, {"calibrate", "train", "validate", "export"}),
        ({"drafter": {"epochs": 1}}, {"pretrain", "calibrate", "train", "validate", "export"}),
        ({"model": {"source": "tiny"}}, set(STAGES)),
        ({"seed": 1}, set(STAGES)),
    ],
)
def test_a_change_reaches_the_stage_and_all_that_read_it(section: dict[str, Any], stages: set[StageName]) -> None:
    assert changed(config_with(), config_with(**section)) == stages


def test_other_code_means_other_keys() -> None:
    config = config_with()
    first, second = run_keys(config, "code"), run_keys(config, "edited")
    assert all(first[stage] != second[stage] for stage in STAGES)


def test_inputs_come_before_the_stages_that_read_them() -> None:
    assert all(STAGES.index(name) < STAGES.index(stage) for stage, names in INPUTS.items() for name in names)


def test_a_data_file_counts_by_content_not_by_place(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    shutil.copy(first, second)
    configs = [config_with(data={"source": "file", "path": str(path)}) for path in (first, second)]
    assert changed(*configs) == set()
    before = run_keys(configs[0], "code")
    first.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    assert run_keys(configs[0], "code")["prepare"] != before["prepare"]


def test_a_draft_model_counts_by_its_files_not_by_its_place(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    (first / "model.safetensors").write_text("1")
    shutil.copytree(first, second)
    drafting = [{"method": "draft_model", "draft_model": str(folder)} for folder in (first, second)]
    configs = [config_with(speculation=section) for section in drafting]
    assert changed(*configs) == set()
    before = run_keys(configs[0], "code")
    (first / "model.safetensors").write_text("22")
    assert run_keys(configs[0], "code")["train"] != before["train"]


def test_a_reward_function_of_the_users_counts_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    source = tmp_path / "mine" / "rewards.py"
    source.write_text("def score(prompt, response, answer): return 1.0\n")
    config = config_with(data={"reward": "mine.rewards:score"})
    for place in (source, tmp_path / "mine" / "rewards" / "__init__.py"):  # a package comes before a module
        place.parent.mkdir(exist_ok=True)
        place.write_text("def score(prompt, response, answer): return 1.0\n")
        assert reward_sources(config.data.reward) == (place,)
        before = run_keys(config, "code")
        place.write_text("def score(prompt, response, answer): return 0.0\n")
        assert run_keys(config, "code")["train"] != before["train"]


def test_data_are_read_once_for_the_keys_of_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr("specrl.keys.file_digest", lambda path: str(read.append(path)))
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    run_keys(config_with(data={"source": "file", "path": str(tmp_path / "a.jsonl")}), "code")
    assert read == [tmp_path / "a.jsonl"]


def test_the_code_digest_sees_edits_renames_and_new_files_of_stages_alone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    digests = [code_digest(tmp_path)]
    (tmp_path / "a.py").write_text("x = 2\n")
    digests.append(code_digest(tmp_path))
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    digests.append(code_digest(tmp_path))
    (tmp_path / "c.py").write_text("")
    digests.append(code_digest(tmp_path))
    assert len(set(digests)) == len(digests)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "d.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert code_digest(tmp_path) == digests[-1]


def test_a_copy_of_a_model_is_the_same_model_and_another_version_of_its_weights_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    before = model_fingerprint(str(folder))
    os.utime(folder / "model.safetensors", (1, 1))
    (folder / "README.md").write_text("another word")
    (folder / ".gitattributes").write_text("x")
    assert model_fingerprint(str(folder)) == before
    for place in (10, 3 * 2**20 - 1):
        changed = bytearray(3 * 2**20)
        changed[place] = 1
        (folder / "model.safetensors").write_bytes(changed)
        assert model_fingerprint(str(folder)) != before
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    (folder / "config.json").write_text("[]")
    assert model_fingerprint(str(folder)) != before
    assert model_fingerprint("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
