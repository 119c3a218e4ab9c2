"""A teacher's log-probs are a part of the advantages, token by token, and nothing where it equals the policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from flows import preflight
from flows.preflight import check_other_models
from specrl.algorithms.advantages import group_advantages
from specrl.algorithms.objective import policy_loss
from specrl.config import Config, ConfigError, TrainConfig, load_config, parse_config
from specrl.config.algorithms import ADVANTAGES
from specrl.distributed import Ranks, join, leave
from specrl.models.shapes import teacher_shape
from specrl.projection.plan import plan
from specrl.projection.simulator.choices import hardware_of, model_of
from specrl.stages import train
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch
from specrl.training.update import update_policy
from specrl.validation.stopping import lost_signals
from tests.unit.test_cli import write_model
from tests.unit.test_keys import changed, config_with
from tests.unit.test_losses import ENTROPY, MASK, logprobs, targets
from tests.unit.test_plan import ROOT, printed
from tests.unit.test_signal import HEALTHY, SAME
from tests.unit.test_update import ALONE, FLAT, SIGNAL, model_dir, scored

# isort: split
from megatron.core import parallel_state

__all__ = ["model_dir"]
ONLY_TEACHER = {"advantage": "none", "correction": "none"}


def test_the_advantage_of_a_token_is_what_the_teacher_says_of_it_beside_the_rewards() -> None:
    """By hand, for log-probs of -1 and -2: 2 + 0.5 (-0.25 + 1) = 2.375 and 2 + 0.5 (-3 + 2) = 1.5.

    Mutation: the log-probs of the engine in place of the trainer's, which are -1 at both tokens, or the other sign.
    """
    lp, of_teacher = logprobs(-1.0, -2.0, 7.0), torch.tensor([[-0.25, -3.0, 9.0]])
    config = TrainConfig.model_validate({"teacher": "t", "teacher_coef": 0.5, "correction": "none"})
    loss, metrics = policy_loss(lp, ENTROPY, MASK, replace(targets(2.0), teacher_logprobs=of_teacher), config)
    loss.backward()
    assert lp.grad is not None and lp.grad.tolist() == [[-2.375, -1.5, 0.0]]
    assert metrics["teacher_kl"].item() == pytest.approx(-0.75 + 1.0)
    _, without = policy_loss(lp, ENTROPY, MASK, targets(2.0), config)
    assert "teacher_kl" not in without


def test_with_several_updates_the_policy_that_sampled_is_compared() -> None:
    lp, of_teacher = logprobs(-1.0, -1.0, 0.0), torch.tensor([[-2.0, -2.0, 0.0]])
    config = TrainConfig.model_validate({"teacher": "t", "correction": "none", "updates_per_step": 2})
    given = replace(targets(0.0, old=[-1.1, -1.1, 0.0]), teacher_logprobs=of_teacher)
    _, metrics = policy_loss(lp, ENTROPY, MASK, given, config)
    assert metrics["teacher_kl"].item() == pytest.approx(2 * 0.9)


def test_the_mean_gradient_is_that_of_the_divergence() -> None:
    """Over all tokens of a distribution, each weighted by how often it is sampled."""
    scores = torch.tensor([0.3, -1.0, 1.2, 0.0], requires_grad=True)
    of_teacher = torch.tensor([0.1, 0.2, -0.4, 0.7]).log_softmax(0)
    lp = scores.log_softmax(0)
    (wanted,) = torch.autograd.grad((lp.exp() * (lp - of_teacher)).sum(), scores, retain_graph=True)
    config = TrainConfig.model_validate({"teacher": "t", "correction": "none"})
    found = torch.zeros(4)
    for token, probability in enumerate(lp.exp().tolist()):
        one = torch.ones(1, 1, dtype=torch.bool)
        given = replace(targets(0.0), advantages=torch.zeros(1, 1), generation_logprobs=torch.zeros(1, 1))
        given = replace(given, teacher_logprobs=of_teacher[None, token, None])
        loss, _ = policy_loss(lp[None, token, None], torch.zeros(1, 1), one, given, config)
        found += probability * torch.autograd.grad(loss, scores, retain_graph=True)[0]
    torch.testing.assert_close(found, wanted)


def test_no_advantage_is_learned_from_rewards_where_it_is_none() -> None:
    assert group_advantages([1.0, 0.0, 5.0], ["a", "a", "b"], ADVANTAGES.choose("none")) == [0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger model than that of `model_dir`, of another family, with more rows than the policy has tokens."""
    torch.manual_seed(1)
    shape = {"vocab_size": 40, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 16}
    folder = tmp_path_factory.mktemp("teacher")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).save_pretrained(folder)
    return folder


def taught(
    policy_dir: Path, teacher_dir: Path, steps: int = 1, lora: dict[str, int] | None = None, **train: object
) -> tuple[list[dict[str, float]], Policy, RolloutBatch]:
    """The metrics of updates on the same rollouts, the policy after them, and the rollouts; the teacher stays."""
    settings = {"teacher": str(teacher_dir), **ONLY_TEACHER, **train}
    config = parse_config({"name": "taught", "policy": {"lr": 1e-2, "lora": lora}, "train": settings})
    policy = Policy(policy_dir, config.policy, dtype="float32", ranks=ALONE, seed=0)
    teacher = Policy(teacher_dir, config.policy, dtype="float32", ranks=ALONE, seed=0, trainable=False)
    before = {name: tensor.clone() for name, tensor in teacher.hf_weights()}
    rollouts = scored([FLAT, SIGNAL], config)
    metrics = [
        update_policy(policy, rollouts, config, None, step=step, teacher=teacher).metrics for step in range(steps)
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.hf_weights())
    return metrics, policy, rollouts


def log_probs(directory: Path, rollouts: RolloutBatch) -> torch.Tensor:
    """Those of the sampled tokens by transformers, one after the other."""
    model, found = AutoModelForCausalLM.from_pretrained(directory), []
    for rollout in rollouts.held.values():
        tokens = torch.tensor([*rollout.prompt_tokens, *rollout.response_tokens])
        with torch.no_grad():
            scores = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(1, tokens[1:, None])[len(rollout.prompt_tokens) - 1 :, 0])
    return torch.cat(found)


def test_a_larger_teacher_of_another_family_scores_what_was_sampled(
    ranks: Ranks, model_dir: Path, teacher_dir: Path
) -> None:
    """Groups without signal are trained on; the loss is minus the mean advantage, as the ratio is 1."""
    (metrics,), _, rollouts = taught(model_dir, teacher_dir, teacher_coef=0.5)
    gap = log_probs(model_dir, rollouts) - log_probs(teacher_dir, rollouts)
    assert metrics["num_tokens"] == 42 and abs(float(gap.mean())) > 0.1
    assert metrics["teacher_kl"] == pytest.approx(float(gap.mean()), abs=1e-5)
    assert metrics["loss"] == pytest.approx(0.5 * float(gap.mean()), abs=1e-5)
    assert rollouts.advantages.tolist() == [0.0] * 6


def test_a_teacher_with_experts_scores_what_a_policy_without_has_sampled(
    ranks: Ranks, model_dir: Path, tmp_path: Path
) -> None:
    shape = {"vocab_size": 40, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32}
    chosen = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "initializer_range": 0.3}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **chosen)).save_pretrained(tmp_path)
    (metrics,), _, rollouts = taught(model_dir, tmp_path)
    gap = log_probs(model_dir, rollouts) - log_probs(tmp_path, rollouts)
    assert abs(float(gap.mean())) > 0.1 and metrics["teacher_kl"] == pytest.approx(float(gap.mean()), abs=1e-5)


def test_rewards_are_learned_from_beside_the_teacher_unless_there_are_none(
    ranks: Ranks, model_dir: Path, teacher_dir: Path
) -> None:
    (both,), _, rollouts = taught(model_dir, teacher_dir, advantage="grpo")
    of_rewards = float((rollouts.advantages * rollouts.response_lengths).sum() / rollouts.response_lengths.sum())
    assert of_rewards != 0
    assert both["loss"] == pytest.approx(both["teacher_kl"] - of_rewards, abs=1e-5)


def test_a_teacher_that_equals_the_policy_teaches_nothing_at_all(ranks: Ranks, model_dir: Path) -> None:
    (metrics,), policy, _ = taught(model_dir, model_dir)
    assert metrics["teacher_kl"] == metrics["loss"] == metrics["grad_norm"] == 0.0
    before = Policy(model_dir, policy.config, dtype="float32", ranks=ALONE, seed=0, trainable=False)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.hf_weights(), before.hf_weights(), strict=True))


def test_the_policy_alone_moves_with_several_updates_and_with_adapters(
    ranks: Ranks, model_dir: Path, teacher_dir: Path
) -> None:
    once, _, _ = taught(model_dir, teacher_dir)
    often, _, _ = taught(model_dir, teacher_dir, steps=2, updates_per_step=2)
    adapted, _, _ = taught(model_dir, teacher_dir, steps=2, lora={"rank": 4})
    for first, second in (often, adapted):
        assert first["teacher_kl"] == pytest.approx(once[0]["teacher_kl"], abs=1e-5) != second["teacher_kl"]


def test_a_teacher_must_be_there_fit_the_ranks_and_have_the_policys_tokens(tmp_path: Path) -> None:
    def problems(directory: Path, **policy: int) -> list[str]:
        sections = {"model": {"source": str(tmp_path / "policy"), "max_length": 256}, "policy": policy}
        sections |= {"resources": {"ranks_per_node": 2}, "train": {"teacher": str(directory)}}
        config = parse_config({"name": "run", **sections})
        lines = check_other_models(config)
        assert all(line.startswith("train.teacher") for line in lines)
        return lines

    write_model(tmp_path / "policy", ["a", "b"], 2)
    for name, vocabulary in {"same": "ab", "more": "abc", "other": "ba", "fewer": "a"}.items():
        write_model(tmp_path / name, list(vocabulary), 3)
    assert problems(tmp_path / "same") == problems(tmp_path / "more") == []
    assert "does not exist" in problems(tmp_path / "missing")[0]
    (line,) = problems(tmp_path / "other")
    assert "token 0 of the policy, 'a', is token 1 of the teacher; take a teacher that has" in line
    (line,) = problems(tmp_path / "fewer")
    assert "token 1 of the policy, 'b', is no token of the teacher" in line
    (line,) = problems(tmp_path / "same", pipeline_parallel=2)
    assert "policy.pipeline_parallel = 2 does not divide the 3 layers of the teacher" in line
    for size, words in (
        ({"num_key_value_heads": 1}, "1 KV heads"),
        ({"intermediate_size": 63}, "intermediate_size = 63"),
    ):
        write_model(folder := tmp_path / words, ["a", "b"], 2, **size)
        assert problems(folder) == []
        (line,) = problems(folder, tensor_parallel=2)
        assert "policy.tensor_parallel = 2 does not divide" in line and line.endswith(f"{words} of the teacher")
    (line,) = problems(tmp_path / "same", expert_parallel=2)
    assert "policy.expert_parallel = 2: the teacher has no experts" in line
    shutil.rmtree(tmp_path / "policy")
    write_model(tmp_path / "policy", ["a", "b", "c"], 2)
    tokenizer = json.loads((tmp_path / "policy" / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["c"]  # a row without a token, which can be sampled
    (tmp_path / "policy" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (line,) = problems(tmp_path / "same")
    assert "its vocab_size = 2 is below the policy's, 3" in line


@pytest.mark.parametrize(
    ("of_policy", "in_generation", "of_teacher", "is_doubtful"),
    [(0, 0, [1, 0], False), (0, 1, 1, True), (None, 1, 1, False), (None, 1, 0, True), (0, 0, None, False)],
)
def test_a_teacher_that_ends_its_responses_otherwise_is_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    of_policy: int | None,
    in_generation: int,
    of_teacher: int | list[int] | None,
    is_doubtful: bool,
) -> None:
    write_model(tmp_path / "policy", ["a", "b"], 2, eos_token_id=of_policy)
    (tmp_path / "policy" / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    write_model(tmp_path / "teacher", ["a", "b"], 2, eos_token_id=of_teacher)
    monkeypatch.setattr(preflight, "DRY_CHECKS", ())
    sections = {"model": {"source": str(tmp_path / "policy")}, "train": {"teacher": str(tmp_path / "teacher")}}
    preflight.check(config_with(**sections), dry_run=True)
    warned = capsys.readouterr().err
    assert ("warning: train.teacher = " in warned and "may unlearn to end" in warned) == is_doubtful


def test_what_the_trainer_loads_is_the_teacher_as_it_is_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "policy", ["a", "b"], 2)
    monkeypatch.setattr(
        train, "Policy", lambda directory, *_, **__: json.loads((directory / "config.json").read_text())
    )
    ranks: Any = SimpleNamespace(is_first=True, barrier=lambda: None)
    for name, layers in (("first", 3), ("moved", 1)):
        write_model(tmp_path / name, ["a", "b"], layers)
        config = config_with(model={"max_length": 256}, train={"teacher": str(tmp_path / name)})
        context: Any = SimpleNamespace(config=config, stage_dir=tmp_path)
        found: Any = train.load_teacher(context, tmp_path / "policy", ranks)
        assert found["num_hidden_layers"] == layers


def test_a_plan_counts_the_teacher_and_names_it(tmp_path: Path) -> None:
    write_model(folder := tmp_path / "teacher", [str(number) for number in range(128)], 48)
    config = load_config(ROOT / "configs/smoke.toml", [f"train.teacher={folder}"])
    made, plain = plan(config), plan(load_config(ROOT / "configs/smoke.toml"))
    shape = teacher_shape(config)
    assert shape is not None and shape.num_layers == 48
    items = {item.name: item for budget in made.budgets if budget.stage == "train" for item in budget.items}
    assert items["teacher's weights"].gib == pytest.approx(shape.parameters * 4 / 2**30, rel=1e-3)
    assert items["teacher's weights"].phase is None and items["teacher's activations"].phase == "teacher"
    needed = [next(b.needed_gib for b in found.budgets if b.stage == "train") for found in (made, plain)]
    assert needed[0] == pytest.approx(needed[1] + items["teacher's weights"].gib)  # its pass is smaller than an update
    others = [item.name for budget in made.budgets if budget.stage != "train" for item in budget.items]
    assert not any(name.startswith("teacher") for name in others)
    assert [f"train.teacher = {folder}", "train.teacher_coef = 1.0"] == [
        line for line in printed(made).replace("\n/", "/").splitlines() if line.startswith("train.teacher")
    ]


def test_a_teacher_counts_by_its_files_for_training_and_what_follows(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_model(tmp_path / name, ["a"], 1)
    configs = [config_with(train={"teacher": str(tmp_path / name)}) for name in ("first", "second")]
    assert changed(*configs) == set()
    assert changed(config_with(), configs[0]) == {"train", "validate", "export"}
    write_model(tmp_path / "other", ["a"], 2)
    assert changed(configs[0], config_with(train={"teacher": str(tmp_path / "other")})) >= {"train"}


def test_a_simulated_step_has_the_passes_of_the_teacher(tmp_path: Path) -> None:
    def passes(config: Config) -> float:
        return model_of(config, hardware_of(config, "H100")).logprob_passes

    write_model(folder := tmp_path / "teacher", ["a"], 4)
    config = load_config(ROOT / "configs/smoke.toml")
    assert passes(config) == 0
    with_teacher = load_config(ROOT / "configs/smoke.toml", [f"train.teacher={folder}"])
    shape = teacher_shape(with_teacher)
    assert shape is not None and 0 < passes(with_teacher) < 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.teacher_coef=2.0"], ["train.teacher_coef = 2 without train.teacher", "name a teacher"]),
        (["train.advantage=none"], ['train.advantage = "none" without train.teacher', 'take "grpo"']),
        (
            ["train.teacher=t", "train.advantage=none", "train.refill_rounds=2"],
            ['train.refill_rounds = 2 with train.advantage = "none"', "leave it out"],
        ),
        (
            ["train.teacher=t", "train.advantage=none", "train.refill_rounds=9"],
            ["train.refill_rounds = 9", "set 0", 'train.algorithm = "dapo" sets it'],
        ),
        (
            ["train.teacher=t", "train.loss=gspo", "train.updates_per_step=2"],
            ['train.loss = "gspo" with train.teacher', 'take "grpo" or "cispo"'],
        ),
        (
            ["train.stop_when={metric='policy/teacher_kl', below=0.1}"],
            ['train.stop_when.metric = "policy/teacher_kl" without train.teacher', "name a teacher"],
        ),
        (
            ["train.teacher=t", "train.advantage=none", "train.kl_coef=0.1", "train.kl_in=reward"],
            ['train.kl_in = "reward" with train.advantage = "none"', 'take "loss"'],
        ),
    ],
)
def test_what_would_teach_nothing_is_refused(settings: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(ROOT / "configs/smoke.toml", settings)
    line = str(refused.value)
    assert "\n" not in line and all(word in line for word in words)


def test_equal_rewards_are_no_lost_signal_where_the_teacher_alone_teaches() -> None:
    def said(train: dict[str, Any], **changes: float) -> list[str]:
        config = parse_config({"name": "x", "train": {"num_steps": 40, **train}})
        metrics = HEALTHY | SAME | {f"policy/{name}": value for name, value in changes.items()}
        return lost_signals([HEALTHY, *[metrics] * 5], HEALTHY, config)

    alone = {"teacher": "t", "advantage": "none"}
    assert said(alone, grad_norm=0.3) == []
    assert "5 steps nothing was learned: all responses" in said({}, grad_norm=0.3)[0]
    (line,) = said({"teacher": "t"}, grad_norm=0.3, teacher_kl=0.1)
    assert "5 steps nothing was learned from rewards: all responses earned the same reward" in line
    (line,) = said(alone, teacher_kl=0.0)
    assert line.endswith("the gradient of the policy was 0; likely train.teacher is the policy itself")
    (line,) = said(alone, teacher_kl=0.1)
    assert "the ratio was clipped everywhere" in line
