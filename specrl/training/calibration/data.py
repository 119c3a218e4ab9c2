"""The choice of the rollouts that the calibration reads, and of how many of their tokens."""

from __future__ import annotations

from dataclasses import replace

from specrl.config import Config
from specrl.schemas import Rollout
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.calibration.calibration import CalibrationData

KL_POSITIONS = 640
"""The number of response tokens, of all ranks, on which the divergence is measured: for the choice, and held out."""
PROBE_POSITIONS, PROBE_SEQUENCES = 64, 2
"""The numbers of response tokens and of responses that pass once per linear layer; they are responses' beginnings."""


def calibration_data(
    rollouts: list[Rollout], config: Config, dp_rank: int, dp_size: int, pad_multiple: int = 1
) -> CalibrationData:
    """This data-parallel rank's share of the first `precision.calibration_tokens` tokens of `rollouts`.

    Of a sequence that is longer than `precision.calibration_length`, the end of the response is left out. There are two
    prompts at least, whatever the number of tokens, and every second one is held out from the choice of layers.
    """
    shortened = [_shortened(rollout, config.precision.calibration_length) for rollout in rollouts]
    chosen = _within(shortened, config.precision.calibration_tokens, prompts=True, at_least=2)
    prompts = sorted({rollout.prompt_id for rollout in chosen})
    assert len(prompts) > 1, "drafter.num_prompts is 2 or more"
    held = set(prompts[1::2])
    selection = [rollout for rollout in chosen if rollout.prompt_id not in held]
    held_out = [rollout for rollout in chosen if rollout.prompt_id in held]

    def batches(items: list[Rollout], longest: int | None = None) -> list[MicroBatch]:
        sequences = [_sequence(item, index, longest) for index, item in enumerate(items)]
        return pack(sequences[dp_rank::dp_size], config.policy.tokens_per_micro_batch, pad_multiple)

    return CalibrationData(
        statistics=batches(chosen),
        probe=batches(_one_per_prompt(selection)[:PROBE_SEQUENCES], PROBE_POSITIONS // PROBE_SEQUENCES),
        selection=batches(_within(selection, KL_POSITIONS, prompts=False), KL_POSITIONS),
        held_out=batches(_within(held_out, KL_POSITIONS, prompts=False), KL_POSITIONS),
    )


def _within(rollouts: list[Rollout], tokens: int, *, prompts: bool, at_least: int = 1) -> list[Rollout]:
    """The leading rollouts that fit into `tokens`, the first sample of every prompt before any second one.

    Args:
        prompts: Whether the tokens of prompts count.
        at_least: The number of rollouts that are returned even if they do not fit.
    """
    chosen: list[Rollout] = []
    for rollout in sorted(rollouts, key=lambda item: (item.sample, item.step, item.prompt_id)):
        tokens -= len(rollout.response_tokens) + (len(rollout.prompt_tokens) if prompts else 0)
        if tokens < 0 and len(chosen) >= at_least:
            break
        chosen.append(rollout)
    return chosen


def _shortened(rollout: Rollout, length: int) -> Rollout:
    room = max(1, length - len(rollout.prompt_tokens))
    return replace(rollout, response_tokens=rollout.response_tokens[:room])


def _one_per_prompt(rollouts: list[Rollout]) -> list[Rollout]:
    return list({rollout.prompt_id: rollout for rollout in reversed(rollouts)}.values())[::-1]


def _sequence(rollout: Rollout, index: int, longest: int | None) -> TokenSequence:
    return TokenSequence.of(rollout.prompt_tokens, rollout.response_tokens[:longest], index)
