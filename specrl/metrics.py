"""The definition of every metric that the project logs; `specrl.tracking` refuses any other name.

A name that ends in `_I` stands for several metrics, one for each draft position or batch size. Positions count from 1
in `spec/acceptance_rate_pos_I`, and from 0 in `drafter/expected_acceptance_pos_I`. Times are wall-clock times of the
first rank, which waits for the others at the end of each part of a step. Log-probs and KL are in nats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A metric's name in MLflow, its unit ("" for a plain ratio), and what exactly is counted."""

    name: str
    unit: str
    description: str
    better: Literal["higher", "lower"] | None = None  # which values are better; None where neither are


_DEFINITIONS = (
    Metric("timing/step_s", "s", "Time of one RL step, from its prompts to the refit and the checkpoint."),
    Metric("timing/generation_s", "s", "Time of the rollouts, from the first request to any rank's last response."),
    Metric(
        "timing/reward_s",
        "s",
        "Part of timing/generation_s in which a rank only waited for rewards, after its last response and the use of "
        "its idle time; of the rank that waited longest.",
    ),
    Metric("timing/policy_update_s", "s", "Time of log-prob passes, forward, backward and optimizer steps."),
    Metric(
        "timing/logprob_s",
        "s",
        "Log-prob passes within timing/policy_update_s, made with several updates, a KL penalty or a teacher.",
    ),
    Metric("timing/drafter_update_s", "s", "Time of the drafter's online update."),
    Metric("timing/refit_s", "s", "Time to load new weights into the engine and to check that they arrived."),
    Metric(
        "timing/validation_s",
        "s",
        "Time of the step's validations, after the refit and, in the first step, also before training; only in steps "
        "that validate (validate.every).",
    ),
    Metric("timing/checkpoint_s", "s", "Time to write the rollouts, and to copy the contents of the checkpoint."),
    Metric("performance/generation_tokens_per_s", "tokens/s", "Response tokens of all ranks over timing/generation_s."),
    Metric(
        "performance/training_tokens_per_s",
        "tokens/s",
        "Prompt and response tokens trained on, of all ranks and without padding, over timing/policy_update_s.",
    ),
    Metric("spec/num_drafts", "drafts", "Drafts verified, and passes that read text ahead, of all requests."),
    Metric("spec/num_draft_tokens", "tokens", "Tokens proposed in these drafts."),
    Metric("spec/num_accepted_tokens", "tokens", "Proposed tokens that were accepted; bonus tokens are not counted."),
    Metric("spec/acceptance_rate", "", "Accepted over drafted tokens, except tokens that were read ahead.", "higher"),
    Metric(
        "spec/acceptance_length",
        "tokens",
        "1 (the bonus token) + accepted tokens over drafts, except tokens that were read ahead.",
        "higher",
    ),
    Metric("spec/acceptance_rate_pos_I", "", "Tokens accepted at position I over drafts of at least I tokens."),
    Metric("spec/own_draft_tokens", "tokens", "The part of spec/num_draft_tokens that was read ahead of decoding."),
    Metric("spec/own_accepted_tokens", "tokens", "The part of spec/num_accepted_tokens that was read ahead."),
    Metric("spec/replay_draft_tokens", "tokens", "The part of spec/num_draft_tokens that came from stored text."),
    Metric("spec/replay_accepted_tokens", "tokens", "The part of spec/num_accepted_tokens that came from stored text."),
    Metric("spec/recent_draft_tokens", "tokens", "The part of spec/num_draft_tokens that came from recent rollouts."),
    Metric("spec/recent_accepted_tokens", "tokens", "The part of spec/num_accepted_tokens from recent rollouts."),
    Metric("spec/continued_draft_tokens", "tokens", "The part of spec/num_draft_tokens in drafts that text continues."),
    Metric("spec/continued_accepted_tokens", "tokens", "The part of spec/num_accepted_tokens of these drafts."),
    Metric("spec/decode_steps", "steps", "Engine iterations of the rank that needed the most."),
    Metric("spec/k", "tokens", "Longest draft of the first rank's engine, mean over the step's decoding iterations."),
    Metric(
        "bubble/idle_s",
        "s",
        "Time from the end of each rank's own rollouts to the end of the slowest rank's, summed over ranks, whether "
        "it was used or not; refills do not count.",
    ),
    Metric("bubble/used_s", "s", "The part of bubble/idle_s that was used."),
    Metric("bubble/overrun_s", "s", "Longest time by which such use outlasted the slowest rank's generation."),
    Metric("bubble/pregenerated_tokens", "tokens", "Tokens of the next step that were generated while waiting."),
    Metric("bubble/drafter_steps", "steps", "Drafter updates that were made while waiting."),
    Metric(
        "mismatch/token_mult_prob_error",
        "",
        "Mean over tokens of exp(|log p_training - log p_generation|); 1 is perfect agreement.",
        "lower",
    ),
    Metric("mismatch/bulk_error", "", "token_mult_prob_error without the largest thousandth of its terms; gated."),
    Metric("mismatch/kl", "nats/token", "KL(generation || training), k3 estimate on the sampled tokens.", "lower"),
    Metric("mismatch/js", "nats/token", "Jensen-Shannon divergence of the engines, estimated on the sampled tokens."),
    Metric("mismatch/importance_ratio_max", "", "Largest p_training / p_generation of a sampled token."),
    Metric("mismatch/truncated_fraction", "", "Share of the tokens whose importance ratio is above 2."),
    Metric(
        "mismatch/routing_tokens",
        "",
        "Share of the tokens trained on, prompts included, that the trainer's routers would send to other experts than "
        "the engine did, in any layer; only for policies with experts.",
        "lower",
    ),
    Metric("mismatch/routing_layers", "", "The same as a share of all pairs of a token and a layer.", "lower"),
    Metric("reward/mean", "", "Mean reward of the step's responses.", "higher"),
    Metric("reward/std", "", "Standard deviation of the reward over the step's responses."),
    Metric("reward/zero_std_fraction", "", "Share of the groups whose rewards are all equal: they carry no signal."),
    Metric("reward/failures", "responses", "Responses whose reward failed; they count as data.reward_on_failure."),
    Metric("reward/overlong_penalty", "", "Mean of what train.overlong_window adds; reward/mean does not include it."),
    Metric("rollout/refill_rounds", "", "How often other prompts were asked in place of groups without signal."),
    Metric("rollout/dropped_groups", "groups", "Groups that were sampled but left out of the update and its mean."),
    Metric("rollout/turns_mean", "turns", "Mean number of the policy's turns in the step's conversations."),
    Metric("rollout/response_length_mean", "tokens", "Mean length of the step's responses."),
    Metric("rollout/response_length_max", "tokens", "Length of the longest response of the step."),
    Metric("rollout/truncated_fraction", "", "Share of responses cut off at sampling.max_response_tokens.", "lower"),
    Metric("policy/loss", "", "Policy loss, with the KL penalty and the entropy bonus if there are any."),
    Metric("policy/grad_norm", "", "Global gradient norm before clipping."),
    Metric("policy/entropy", "nats/token", "Mean entropy of the policy at the trained tokens."),
    Metric("policy/clip_fraction", "", "Share of the trained tokens whose ratio was clipped."),
    Metric("policy/corrected_fraction", "", "Share of the trained tokens that train.correction truncated or masked."),
    Metric("policy/kl", "nats/token", "KL(policy || reference), train.kl_estimator; only with train.kl_coef above 0."),
    Metric(
        "policy/teacher_kl",
        "nats/token",
        "KL(policy || train.teacher), estimated: the mean of log p - log p_teacher over the trained tokens, with "
        "p of the policy that sampled; only with a teacher.",
        "lower",
    ),
    Metric("policy/lr", "", "Learning rate of the update, mean over the step's updates."),
    Metric("policy/real_token_share", "", "Share of the tokens in training passes that are not padding."),
    Metric("policy/shared_token_share", "", "Share of trained tokens not computed, because responses share a prompt."),
    Metric(
        "drafter/loss",
        "",
        "`drafter.loss` against the policy on the draft vocabulary, weighted by `drafter.position_decay`, and summed.",
        "lower",
    ),
    Metric("drafter/grad_norm", "", "Global gradient norm before clipping."),
    Metric("drafter/sampled_fraction", "", "Share of the trained responses that the drafter learns from."),
    Metric("drafter/num_tokens", "tokens", "Drafted positions in the drafter's training, over all ranks."),
    Metric(
        "drafter/top1_match",
        "",
        "Share of the positions at which the drafter's likeliest token is the policy's, at the first TTT step.",
        "higher",
    ),
    Metric(
        "drafter/expected_acceptance_pos_I",
        "",
        "Mean probability under the policy of the draft at position I (from 0), after the response's own tokens.",
    ),
    Metric(
        "drafter/acceptance_length",
        "tokens",
        "Acceptance length if the drafter's training responses were decoded again with k = TTT steps.",
        "higher",
    ),
    Metric("refit/max_abs_logprob_diff", "nats", "Largest |log p_engine - log p_trainer| on the parity probe."),
    Metric("refit/mean_abs_logprob_diff", "nats", "Mean |log p_engine - log p_trainer| on the parity probe."),
    Metric("refit/probe_acceptance_length", "tokens", "Acceptance length on the drafter's fixed probe, where it ran."),
    Metric("refit/drafter_reloads", "", "1 if the drafter had collapsed and its last good version was loaded, else 0."),
    Metric("refit/speculating", "", "1 if the engine drafts, 0 if it does not, or no longer does."),
    Metric("warm_start/loss", "nats/token", "Cross-entropy of the demonstrations in `prepare`."),
    Metric("warm_start/grad_norm", "", "Global gradient norm before clipping."),
    Metric("warm_start/lr", "", "Learning rate of the step."),
    Metric("pretrain/num_responses", "responses", "Responses that the drafter was pretrained on."),
    Metric("pretrain/reward_mean", "", "Mean reward of these responses."),
    Metric("calibration/kl_all_fp8", "nats/token", "KL(bf16 || fp8) of held-out output, all linear layers in FP8."),
    Metric("calibration/kl_chosen", "nats/token", "The same with the chosen layers in BF16."),
    Metric("calibration/num_bf16_layers", "layers", "Linear layers kept in BF16."),
    Metric("calibration/bf16_flop_fraction", "", "Share of the linear layers' FLOPs that stays in BF16."),
    Metric("calibration/kv_scale_max", "", "Largest scale of a layer's keys or values in an FP8 KV cache."),
    Metric("validate/accuracy_before", "", "Mean reward of the policy of `prepare` on held-out prompts."),
    Metric("validate/accuracy_after", "", "Mean reward of the trained policy on held-out prompts."),
    Metric("validate/acceptance_length", "tokens", "spec/acceptance_length on held-out prompts."),
    Metric("validate/differences_per_1000_tokens", "", "First tokens changed by speculation, in sampled responses."),
    Metric("validate/greedy_differences_per_1000_tokens", "", "The same in greedy responses."),
    Metric("validate/unexplained_differences", "tokens", "Those of both that no near-tie explains; must be 0."),
    Metric(
        "validate/lead_noise",
        "nats",
        "Largest change of a token's lead between batches of plain decoding; measured only if tokens differ.",
    ),
    Metric("validate/exactness_accepted_tokens", "tokens", "Accepted drafts in these responses."),
    Metric("speedup/generation", "", "Median of speedup/generation_batch_I over the batch sizes measured."),
    Metric(
        "speedup/generation_batch_I",
        "",
        "Plain over speculative generation time in matched pairs at batch size I; plain is k = 0 on the same engine.",
    ),
    Metric(
        "speedup/step",
        "",
        "Time of an RL step with plain decoding, over its time as configured. In a run: speedup/generation, applied to "
        "the share of generation in the run's steps, without validations; plain decoding trains no drafter. In "
        "`specrl bench run`: matched whole trainings, per response token, median over the steps.",
        "higher",
    ),
    Metric(
        "speedup/end_to_end",
        "",
        "Time of a whole training with plain decoding, over its time as configured; per token, start included.",
        "higher",
    ),
    Metric("export/vllm_acceptance_length", "tokens", "Acceptance length of the exported directory in a fresh vLLM."),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _DEFINITIONS}
assert len(METRICS) == len(_DEFINITIONS), "a metric is defined twice"

OF_PARTS = "reward/part/"
POLICY = Metric("policy/NAME", "", "Mean over the trained tokens of the metric NAME that train.loss returns.")
_OF_SETS = (
    Metric("validation/NAME/accuracy", "", "Mean reward of all responses to the held-out set NAME.", "higher"),
    Metric("validation/NAME/avg_at_k", "", "Share of all responses with validate.correct_reward or more.", "higher"),
    Metric("validation/NAME/pass_at_k", "", "Share of the prompts with such a response among their k.", "higher"),
    Metric("validation/NAME/pass_at_I", "", "The same among I responses, an unbiased estimate from the k.", "higher"),
    *(
        Metric(f"validation/NAME/{score}_{end}", "", f"The {end} end of the 95 % interval of {score}, over prompts.")
        for score in ("accuracy", "avg_at_k", "pass_at_k")
        for end in ("low", "high")
    ),
    Metric("validation/NAME/response_length_mean", "tokens", "Mean length of the responses."),
    Metric("validation/NAME/response_length_max", "tokens", "Length of the longest response."),
    Metric("validation/NAME/truncated_fraction", "", METRICS["rollout/truncated_fraction"].description, "lower"),
    Metric("validation/NAME/seconds", "s", "Time of generation and scoring.", "lower"),
    Metric(
        "validation/NAME/decode_steps_per_token",
        "",
        "Iterations per response token; methods with replay draft from the previous answers.",
        "lower",
    ),
)
VALIDATION = {metric.name.rpartition("/")[2]: metric for metric in _OF_SETS}
"""The metrics of a held-out set NAME, by their last part. In MLflow their step is the number of RL steps trained."""
FAMILIES = (
    *_OF_SETS,
    Metric(
        "validate/NAME_token_share_batch_I",
        "",
        "Share of the tokens in the matched pairs at batch size I that the source NAME (drafter, replay, recent or "
        "continued) drafted and that were accepted.",
    ),
    POLICY,
    Metric(f"{OF_PARTS}NAME", "", "Mean of the part NAME of data.reward over the step's responses, unweighted."),
    Metric("bench/NAME", "", "Column NAME of the rows of a benchmark; the step is the number of the row."),
    Metric("system/NAME", "", "Load of the first node, as MLflow measures it; other nodes: system/node_I/NAME."),
)
"""Metrics whose names are formed at run time."""
_PATTERNS = [
    (re.compile(re.sub("_I$", r"_\\d+", metric.name).replace("NAME", ".+")), metric)
    for metric in (*METRICS.values(), *FAMILIES)
    if metric.name.endswith("_I") or metric in FAMILIES
]


def find_metric(name: str) -> Metric | None:
    """The definition of a metric, or None for a name that has none; `NAME` and `I` stand for a word and a number."""
    found = (metric for pattern, metric in _PATTERNS if pattern.fullmatch(name))
    return METRICS.get(name) or next(found, None)
