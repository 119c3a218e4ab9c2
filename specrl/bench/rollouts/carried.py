"""`specrl bench rollouts --after-update`: how far responses follow text of the same seed after a run's RL steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from specrl.bench.job import BenchJob, Subject, say
from specrl.bench.pages import table, titled, write_results
from specrl.bench.rollouts.engines import speculation_of
from specrl.config import Config, ConfigError
from specrl.rollout.engine import Generation, Request, StoredText, start_engine
from specrl.rollout.vllm.weights.load import read_weights

ENDS = (250, 500, 1000, 2000, 4000, 8000, 16000)  # of the parts of responses, one row each
TITLE = "Text of the same seed after an update of the policy"
HOW = """
Run `{run}`, `{config.model.source}` in {config.model.dtype}. The policy before RL answers {count} requests with
{tokens} tokens each; stop tokens do not end a response. The policy after {config.train.num_steps} RL step(s) with
`policy.lr = {config.policy.lr:g}` answers them again, with the same seeds at temperature
{config.sampling.temperature:g}. It verifies the first answers many tokens at a time, and drafts from them after the
first difference. As long as both agree, the log-probs of the sampled tokens differ by {moved:.2g} nats on average.

Responses agree for a median of {median:.0f} tokens; individually: {agree}.

*the same* is the share of responses that agree up to the end of the row's part, *followed* the share of tokens that
were accepted drafts, *accepted* that of the drafted tokens; *tokens an iteration* counts those of one request.
"""
COLUMNS = {"tokens": "part", "the same": "same", **titled("followed", "accepted")}
COLUMNS |= {"tokens an iteration": "tokens_per_iteration"}


def measure(job: BenchJob, subject: Subject, requests: Sequence[Request], tokens: int) -> None:
    """Generate with the policies before and after the run's RL steps, and write the rows and the page."""
    config = config_of(subject.config, requests, tokens)
    requests = [replace(request, max_tokens=tokens, stop=()) for request in requests]
    engine = start_engine(config, subject.first_policy_dir, None)
    engine.stop_tokens = []
    engine.set_k(0)
    before = engine.generate(requests)
    say(f"before the update: {before.num_tokens} tokens in {before.seconds:.0f} s")
    engine.refit(read_weights(subject.policy_dir), None)
    engine.set_k(engine.longest_k)
    texts = zip(requests, before.responses, strict=True)
    engine.set_replay([StoredText(asked.prompt_tokens, said.tokens, asked.seed) for asked, said in texts])
    after = engine.generate(requests, learn=False)
    say(f"after the update: {after.num_tokens} tokens in {after.seconds:.0f} s")
    engine.shutdown()
    rows, moved = compared(requests, before, after)
    agree = sorted(rows[-1]["agree"])
    values: dict[str, Any] = {"run": job.run_dir and job.run_dir.name, "config": config, "tokens": tokens}
    values |= {"count": len(agree), "moved": moved, "median": np.median(agree), "agree": ", ".join(map(str, agree))}
    write_results(job, rows, TITLE, [HOW.format(**values), table(rows, COLUMNS)])


def config_of(run: Config, requests: Sequence[Request], tokens: int) -> Config:
    """The run's configuration, drafting only from text at full length; check that responses of that length fit."""
    longest = max(len(request.prompt_tokens) for request in requests) + tokens
    if longest > run.model.max_length:
        raise ConfigError(
            f"--max-tokens {tokens}: with its prompt a response has up to {longest} tokens, and model.max_length = "
            f"{run.model.max_length}; add --set model.max_length={longest}"
        )
    config = run.model_copy(update={"speculation": speculation_of(run.speculation, "replay", 1)})
    most = max(run.engine.max_num_seqs, len(requests))
    return config.updated(speculation={"adaptive": False}, engine={"max_num_seqs": most})


def compared(requests: Sequence[Request], before: Generation, after: Generation) -> tuple[list[dict[str, Any]], float]:
    """Make a row for each part of the responses, and for those before and after their first difference.

    Also return the mean difference of log-probs, in nats, before the first difference.
    """
    old, new = (np.array([one.tokens for one in side.responses]) for side in (before, after))
    old_logprobs, logprobs = (np.array([one.logprobs for one in side.responses]) for side in (before, after))
    same = np.logical_and.accumulate(old == new, axis=1)
    drafted, accepted = np.zeros_like(new), np.zeros_like(new)
    for place, (request, response) in enumerate(zip(requests, after.responses, strict=True)):
        for draft in response.drafts:
            start = draft.context - len(request.prompt_tokens)
            drafted[place, start : start + draft.drafted] += 1
            accepted[place, start : start + draft.accepted] += 1
    whole, positions = np.ones_like(same), np.arange(new.shape[1])
    ends = [*(end for end in ENDS if end < len(positions)), len(positions)]
    parts = {
        f"{first + 1} to {end}": whole & (first <= positions) & (positions < end) for first, end in pairwise([0, *ends])
    }
    parts |= {"before the first difference": same, "from it on": ~same, "all": whole}
    rows: list[dict[str, Any]] = []
    for part, among in parts.items():
        tokens, hits = int(among.sum()), int(accepted[among].sum())
        shares = {"followed": hits / max(1, tokens), "accepted": hits / max(1, int(drafted[among].sum()))}
        rows.append({"part": part, **shares, "tokens_per_iteration": tokens / max(1, tokens - hits)})
    for row, end in zip([*rows[: len(ends)], rows[-1]], [*ends, len(positions)], strict=True):
        row["same"] = float(same[:, end - 1].mean())
    rows[-1]["agree"] = same.sum(axis=1).tolist()
    return rows, float(np.abs(old_logprobs - logprobs)[same].mean()) if same.any() else 0.0
