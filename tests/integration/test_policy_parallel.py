"""Policies of every family on one and two ranks: equal to transformers, and to each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specrl.config import PolicyConfig
from specrl.models.families import family_of_model, head_dim
from specrl.models.shapes import ModelShape
from specrl.projection.traffic import refit_cost
from tests.checkpoints import whole_state
from tests.forks import run_module
from tests.integration import policy_worker as worker
from tests.integration.policy_worker import LAYOUTS, MOVES

PARALLEL = ["tensor", "pipeline", "data"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policies")
    for family in worker.FAMILIES:
        worker.make_model(family, directory)
    run_module("tests.integration.policy_worker", directory)
    return directory


@pytest.fixture(scope="module")
def results(scratch: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: worker.results_of(world, layout, scratch) for name, (world, layout) in LAYOUTS.items()}


def transformers_outputs(model_dir: Path, family: str) -> dict[int, tuple[Tensor, Tensor]]:
    """Logits [length, vocab] and inputs of the feature layers [length, 4 * hidden] of each sequence."""
    model = worker.FAMILIES[family][0].from_pretrained(model_dir, dtype=torch.float32)
    outputs, before_norm = {}, list[Tensor]()
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        for sequence in worker.sequences():
            out = model(torch.tensor([sequence.tokens]), output_hidden_states=True)
            inputs = [*out.hidden_states[:-1], before_norm.pop()]  # transformers gives the last one normed
            hidden = torch.cat([inputs[layer][0] for layer in worker.LAYERS], -1)
            outputs[sequence.index] = (out.logits[0], hidden)
    return outputs


def merged(ranks: list[dict[str, Any]], family: str, key: str) -> dict[int, Tensor]:
    return {index: tensor for rank in ranks for index, tensor in rank[family][key].items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_logits_and_features_equal_transformers(
    results: dict[str, list[dict[str, Any]]], scratch: Path, family: str, layout: str
) -> None:
    found = {key: merged(results[layout], family, key) for key in ("logits", "hidden", "top1", "logprobs")}
    for index, (logits, hidden) in transformers_outputs(scratch / family, family).items():
        sequence = worker.sequences()[index]
        outputs = slice(sequence.prompt_length - 1, -1)
        torch.testing.assert_close(found["logits"][index][outputs], logits[outputs], atol=1e-4, rtol=0)
        torch.testing.assert_close(found["hidden"][index], hidden, atol=1e-4, rtol=0)
        assert torch.equal(found["top1"][index][outputs], logits[outputs].argmax(-1))
        targets = torch.tensor(sequence.tokens)[sequence.prompt_length :, None]
        expected = (logits[outputs] / 0.7).log_softmax(-1).gather(-1, targets)[:, 0]
        torch.testing.assert_close(found["logprobs"][index], expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_logits_of_a_few_tokens_at_a_time_give_what_those_of_all_give(
    results: dict[str, list[dict[str, Any]]], family: str, layout: str
) -> None:
    """Padded and tied vocabularies too; products of fewer rows may round otherwise in the last bit of float32."""
    for rank in results[layout]:
        whole, parts = rank[family]["passes"]
        assert all(torch.equal(*pair) for pair in zip(whole["top1"], parts["top1"], strict=True))
        for key in ("logprobs", "gradients"):
            for expected, found in zip(whole[key], parts[key], strict=True):
                assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_gradients_are_those_of_sequences_that_share_no_prompt(
    results: dict[str, list[dict[str, Any]]], family: str, layout: str
) -> None:
    assert results[layout][0][family]["shared"] > 0
    for rank in results[layout]:
        shared, alone = rank[family]["gradients"]
        scale = max(float(gradient.abs().max()) for gradient in alone)
        assert scale > 0
        for found, expected in zip(shared, alone, strict=True):
            torch.testing.assert_close(found / scale, expected / scale, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_weights_come_back_bit_by_bit_on_every_rank(
    results: dict[str, list[dict[str, Any]]], scratch: Path, family: str, layout: str
) -> None:
    model = worker.FAMILIES[family][0].from_pretrained(scratch / family, dtype=torch.float32)
    expected = model.state_dict()
    assert "lm_head.weight" in expected
    for rank in results[layout]:
        loaded = rank[family]["loaded"]
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def check_traffic(rank: dict[str, Any], family: str, layout: tuple[int, int]) -> None:
    """What a refit sends is what the plan says, in the memory of one layer."""
    hf, size = worker.FAMILIES[family][1], worker.SHAPE
    shape = ModelShape(
        family_of_model(hf),
        *(size[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size")),
        *(size[key] for key in ("num_attention_heads", "num_key_value_heads")),
        head_dim(hf),
        worker.VOCABULARY,
        hf.tie_word_embeddings,
        max_positions=256,
    )
    policy = PolicyConfig(tensor_parallel=layout[0], pipeline_parallel=layout[1])
    cost = refit_cost(shape, policy, element_size=4, stage=rank["stage"])
    found = rank["traffic"]
    assert (found["stage_bytes"], found["rank_bytes"]) == (cost.stage_bytes, cost.rank_bytes)
    assert found["peak_bytes"] <= 4 * shape.parameters_per_layer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_a_refit_sends_what_the_plan_says_in_the_memory_of_one_layer(
    results: dict[str, list[dict[str, Any]]], family: str, layout: str
) -> None:
    for rank in results[layout]:
        check_traffic(rank[family], family, LAYOUTS[layout][1])


def test_a_refit_over_stages_and_ranks_sends_what_the_plan_says(
    results: dict[str, list[dict[str, Any]]], scratch: Path
) -> None:
    world, move = MOVES["TP and PP 1 to 2"]
    for rank in worker.moved(world, move, scratch):
        check_traffic(rank, "llama-tied", move.layout)


@pytest.mark.parametrize("layout", PARALLEL)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_three_updates_are_the_same_on_every_layout(
    results: dict[str, list[dict[str, Any]]], family: str, layout: str
) -> None:
    alone = results["alone"][0][family]
    for rank in results[layout]:
        assert rank[family]["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
        moved = 0.0
        for name, tensor in alone["trained"].items():
            torch.testing.assert_close(rank[family]["trained"][name], tensor, atol=2e-4, rtol=0, msg=name)
            moved = max(moved, float((tensor - alone["loaded"][name]).abs().max()))
        assert moved > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_a_step_without_tokens_moves_nothing_and_the_reference_stays(
    results: dict[str, list[dict[str, Any]]], family: str, layout: str
) -> None:
    for rank in results[layout]:
        result = rank[family]
        assert result["unmoved"] and result["features_equal"]
        for index, logprobs in result["reference"].items():
            torch.testing.assert_close(logprobs, result["logprobs"][index], atol=0, rtol=0)
        for name, tensor in result["trained"].items():
            assert torch.equal(result["after_reference"][name], tensor)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_a_drafter_whose_rows_are_divided_among_ranks_learns_the_same(
    results: dict[str, list[dict[str, Any]]], family: str, layout: str
) -> None:
    """On one rank or on the two that hold a policy together."""
    alone = results["alone"][0][family]["drafter"]
    assert alone["rows"] == alone["all rows"] < len(worker.sequences())
    found = [rank[family]["drafter"] for rank in results[layout]]
    rows = [rank["rows"] for rank in found]
    assert sum(rows) == alone["rows"] and min(rows) > 0
    for rank in found:
        for metrics, expected in zip(rank["metrics"], alone["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-6)
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], tensor, atol=2e-4, rtol=0, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_a_saved_policy_loads_in_transformers(
    results: dict[str, list[dict[str, Any]]], scratch: Path, family: str, layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    model = worker.FAMILIES[family][0].from_pretrained(scratch / f"{family}-{world}-{sizes}" / "saved")
    assert model.dtype == torch.float32
    trained = results[layout][0][family]["trained"]
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_policy_continues_bit_by_bit(
    results: dict[str, list[dict[str, Any]]], dtype: str, layout: str
) -> None:
    for rank in results[layout]:
        result = rank[dtype]
        assert result["step"] == 2 and result["kept"] == ["step=000002"]
        assert result["metrics"][0] == result["metrics"][1]
        for key in ("weights", "optimizer"):
            straight, resumed = result[key]
            assert straight.keys() == resumed.keys()
            assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_is_full_for_one_rank_is_one_line_on_all(
    results: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    """Nothing half-written is left, and the checkpoint before is what a new start finds."""
    last = LAYOUTS[layout][0] - 1
    for rank in results[layout]:
        line = f"checkpoint for step 3 cannot be written to .* \\(rank {last}: .*File too large.*\\): make room"
        assert re.search(line, rank["float32"]["full disk"])
        # Mutation: a writer that reports OSErrors alone, so that the first rank waits for ever.
        assert f"(rank {last}: no memory to write with)" in rank["float32"]["no memory"]
        assert rank["float32"]["kept"] == ["step=000002"]


@pytest.mark.parametrize("name", MOVES)
def test_a_checkpoint_is_read_by_every_layout(
    results: dict[str, list[dict[str, Any]]], scratch: Path, name: str
) -> None:
    """Bit by bit what was stored; and two more steps, up to reduction order those of a run that never moved."""
    world, move = MOVES[name]
    stored, again = whole_state(scratch / move.source), whole_state(scratch / move.folder(world) / "step=000002")
    assert stored.keys() == again.keys() and not any(tensor.isnan().any() for tensor in stored.values())
    assert [key for key, tensor in stored.items() if not torch.equal(again[key], tensor)] == []
    straight = results["alone"][0]["float32"]
    for rank in worker.moved(world, move, scratch):
        assert rank["metrics"][0].keys() == straight["metrics"][0][0].keys()
        for found, expected in zip(rank["metrics"], straight["metrics"][0], strict=True):
            assert found == pytest.approx(expected, rel=1e-4)
        for key, tensor in rank["restored"].items():
            if f"master {key}" in stored:
                assert torch.equal(tensor, stored[f"master {key}"].view_as(tensor)), key
        for key, tensor in straight["weights"][0].items():
            torch.testing.assert_close(rank["weights"][key], tensor, atol=2e-4, rtol=0, msg=key)
