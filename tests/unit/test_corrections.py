"""What each correction does to the weights of tokens that two engines disagree about."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specrl.config.algorithms import CORRECTIONS
from specrl.training.calibration import LayerRow, write_layers
from specrl.validation.precision import EngineMismatchError, check_agreement

RATIOS = torch.tensor([[1.0, 3.0, 0.2, 9.0], [1.1, 0.9, 1.0, 0.1], [1.5, 1.5, 8.0, 1.0]])
MASK = torch.tensor([[True, True, True, False], [True, True, True, False], [True, True, True, True]])


def weights(name: str, ratios: Tensor = RATIOS, mask: Tensor = MASK, **options: object) -> tuple[Tensor, Tensor]:
    """Return the weights of a correction and what it corrected."""
    correction = CORRECTIONS.function(CORRECTIONS.choose({"name": name, **options}))
    found, corrected = correction(ratios.log() * mask, mask)
    return found * mask, corrected


def test_without_correction_every_token_counts_fully() -> None:
    found, corrected = weights("none")
    assert torch.equal(found, MASK.float())
    assert not corrected.any()


def test_tis_truncates_large_ratios_and_keeps_small_ones() -> None:
    found, corrected = weights("tis", cap=2.0)
    torch.testing.assert_close(found[0], torch.tensor([1.0, 2.0, 0.2, 0.0]))
    assert corrected.tolist() == [[False, True, False, False], [False] * 4, [False, False, True, False]]


def test_icepop_masks_tokens_outside_the_range_on_both_sides() -> None:
    found, corrected = weights("icepop", range=(0.5, 2.0))
    torch.testing.assert_close(found[0], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(found[2], torch.tensor([1.5, 1.5, 0.0, 1.0]))
    assert corrected[0].tolist() == [False, True, True, False]


def test_seq_mask_drops_responses_with_any_token_outside() -> None:
    found, corrected = weights("seq-mask", range=(0.5, 5.0), by="any")
    assert found.sum(1).tolist() == pytest.approx([0.0, 3.0, 0.0])
    assert corrected.sum(1).tolist() == [3, 0, 4]


def test_seq_mask_by_the_geometric_mean_forgives_single_tokens() -> None:
    found, corrected = weights("seq-mask", range=(0.8, 1.5), by="mean", cap=2.0)
    assert found[2].sum() == 0  # (1.5 * 1.5 * 8)^(1/4) = 2.06
    torch.testing.assert_close(found[0], torch.tensor([1.0, 2.0, 0.2, 0.0]))  # 0.84; its large ratio is truncated
    assert corrected[1].sum() == 0


@given(st.lists(st.floats(0.01, 50.0), min_size=1, max_size=12), st.sampled_from(["none", "tis", "icepop", "seq-mask"]))
@settings(deadline=None)
def test_no_weight_is_above_its_bound_and_what_is_masked_says_nothing(values: list[float], mode: str) -> None:
    ratios = torch.tensor([[*values, float("nan")]])
    mask = torch.ones_like(ratios, dtype=torch.bool)
    mask[0, -1] = False
    ratios[0, -1] = 1e9
    found, corrected = weights(mode, ratios, mask)
    bound = {"none": 1.0, "tis": 2.0, "icepop": 5.0, "seq-mask": 2.0}[mode]
    assert 0.0 <= float(found.min()) <= float(found.max()) <= bound * (1 + 1e-5)
    assert not corrected[0, -1]


def test_a_token_whose_ratio_is_not_a_number_is_masked() -> None:
    ratios = torch.tensor([[1.0, float("nan")]])
    mask = torch.ones_like(ratios, dtype=torch.bool)
    found, _ = weights("icepop", ratios, mask)
    assert found.tolist() == [[1.0, 0.0]]


def test_lost_agreement_stops_the_run_with_the_layer_table(tmp_path: Path) -> None:
    rows = [LayerRow(f"layers.{i}.linear_fc2", 100, i * 1e-4, "fp8") for i in range(20)]
    write_layers(tmp_path / "layers.arrow", rows)
    path = tmp_path / "layers.arrow"
    check_agreement({}, 1.1, path)
    check_agreement({"mismatch/bulk_error": 1.09, "mismatch/kl": 0.1}, 1.1, path)
    for error in (1.11, float("nan")):
        with pytest.raises(EngineMismatchError, match=r"max_token_mult_prob_error = 1\.1") as raised:
            check_agreement({"mismatch/bulk_error": error, "mismatch/kl": 0.1}, 1.1, path)
        lines = str(raised.value).splitlines()
        assert lines[2].startswith("layers.19.linear_fc2")
        assert lines[-1].startswith("... 8 more in")
