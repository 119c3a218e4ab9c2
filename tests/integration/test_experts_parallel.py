"""Mixtures of experts on one, two and four ranks: equal to transformers, and to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from tests.checkpoints import whole_state
from tests.forks import run_module
from tests.integration import expert_worker as worker
from tests.integration.expert_worker import LAYOUTS
from tests.integration.policy_worker import LAYERS as FEATURE_LAYERS
from tests.integration.policy_worker import sequences

WHOLE = [name for name, layout in LAYOUTS.items() if layout.source is None]
MOVED = [name for name, layout in LAYOUTS.items() if layout.source is not None]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    worker.make_model(directory / "model")
    run_module("tests.integration.expert_worker", directory)
    return directory


@pytest.fixture(scope="module")
def results(scratch: Path) -> Results:
    return {
        name: [torch.load(scratch / f"{name}-{rank}.pt", weights_only=False) for rank in range(layout.world)]
        for name, layout in LAYOUTS.items()
    }


@pytest.mark.parametrize("layout", WHOLE)
def test_log_probs_and_features_equal_transformers(results: Results, scratch: Path, layout: str) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(scratch / "model", dtype=torch.float32)
    logprobs, hidden = (worker.merged(results[layout], key) for key in ("logprobs", "hidden"))
    for sequence in sequences():
        tokens = torch.tensor(sequence.tokens)
        with torch.no_grad():
            out = model(tokens[None], output_hidden_states=True)
        expected = (out.logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        expected = expected[sequence.prompt_length - 1 :]
        torch.testing.assert_close(logprobs[sequence.index], expected, atol=2e-4, rtol=0)
        inputs = torch.cat([out.hidden_states[layer][0] for layer in FEATURE_LAYERS[:-1]], -1)
        found = hidden[sequence.index][:, : inputs.shape[1]]
        torch.testing.assert_close(found, inputs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", WHOLE)
def test_weights_come_back_bit_by_bit_on_every_rank(results: Results, layout: str) -> None:
    expected = results["alone"][0]["loaded"]
    assert "model.layers.5.mlp.experts.7.down_proj.weight" in expected
    for rank in results[layout]:
        assert rank["loaded"].keys() == expected.keys()
        assert all(torch.equal(rank["loaded"][name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("layout", [name for name in WHOLE if name != "alone"])
def test_two_updates_are_the_same_on_every_layout(results: Results, layout: str) -> None:
    """Router and experts included, and the norm of all gradients, which the updates are clipped to; the second update
    replays given experts."""
    alone = results["alone"][0]
    for rank in results[layout]:
        for found, expected in zip(rank["metrics"], alone["metrics"], strict=True):
            assert found == pytest.approx(expected, rel=1e-4)
        for name, tensor in alone["trained"].items():
            torch.testing.assert_close(rank["trained"][name], tensor, atol=2e-4, rtol=0, msg=name)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "alone"])
def test_given_experts_are_replayed_alike_on_every_layout(results: Results, layout: str) -> None:
    """Whichever rank holds the layer, the expert or the part of the sequence, also where it is computed again."""
    alone = results["alone"][0]
    expected, own = alone["replayed"], alone["logprobs"]
    assert min(float((expected[index] - own[index]).abs().max()) for index in own) > 0.01
    assert (
        0.5 < alone["disagreement"]["mismatch/routing_layers"] < alone["disagreement"]["mismatch/routing_tokens"] <= 1
    )
    found = worker.merged(results[layout], "replayed")
    assert found.keys() == expected.keys()
    for index, logprobs in expected.items():
        torch.testing.assert_close(found[index], logprobs, atol=5e-4, rtol=0)
    for rank in results[layout]:
        assert rank["disagreement"] == pytest.approx(alone["disagreement"], abs=0.005)


@pytest.mark.parametrize("layout", MOVED)
def test_a_checkpoint_is_read_by_another_layout(results: Results, scratch: Path, layout: str) -> None:
    """Bit by bit what was stored; and the next update is that of a run that never moved."""
    source = LAYOUTS[layout].source
    assert source is not None
    stored, again = (whole_state(scratch / name / "step=000001") for name in (source, layout))
    assert stored.keys() == again.keys()
    assert [key for key, tensor in stored.items() if not torch.equal(again[key], tensor)] == []
    for rank in results[layout]:
        assert rank["metrics"][0] == pytest.approx(results["alone"][0]["metrics"][1], rel=1e-4)


def test_experts_are_divided_among_the_ranks(results: Results) -> None:
    """Everything else is held as without expert parallelism."""
    sizes = {name: [rank["num_parameters"] for rank in results[name]] for name in LAYOUTS}
    experts = 6 * 8 * 3 * 64 * 48
    (alone,) = sizes["alone"]
    assert sizes["experts"] == [alone - experts // 2] * 2
    assert sizes["tensor"][0] - sizes["tensor and experts"][0] == experts // 2
    assert sizes["tensor"][0] - sizes["all experts apart"][0] == experts * 3 // 4
