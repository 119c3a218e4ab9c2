"""The rollout engine of one rank: in-process vLLM, speculative and exact, refitted in place every step."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specrl.config import Config
from specrl.distributed import join
from specrl.rollout import vllm_patch
from specrl.rollout.acceptance import SpeculationStats
from specrl.rollout.engine_arguments import ENVIRONMENT, engine_arguments, stop_tokens
from specrl.rollout.parity import DrafterCollapseError, PolicyParityError
from specrl.rollout.refit import Weights, differing_tensors, refit_drafter, refit_policy, weight_names
from specrl.rollout.self_test import CraftedInputs

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this, except 0."""


@dataclass(frozen=True)
class Request:
    """One response to sample. What the sampler cannot honour exactly (min_p, logit_bias, ...) cannot be asked for."""

    prompt_tokens: list[int]
    seed: int
    """In [0, 2^63); with the position it decides the random number of each token."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is all tokens."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise ValueError("a request needs at least one prompt token")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed} is outside [0, 2^63)")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens = {self.max_tokens} must be at least 1")
        if self.temperature != 0 and self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature = {self.temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"top_p = {self.top_p} must be in (0, 1] and top_k = {self.top_k} not negative")


@dataclass(frozen=True)
class Response:
    """Tokens include the stop token, text does not; log-probs are under the distribution sampled from."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    """`stop` at an end token, `length` at max_tokens or the context's end."""
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    started_at: float
    """Unix seconds, end of the first iteration that worked on its prompt."""
    finished_at: float
    """Unix seconds."""


@dataclass(frozen=True)
class Generation:
    responses: list[Response]
    """In the order of the requests."""
    stats: SpeculationStats
    seconds: float
    num_tokens: int


def response_seed(run_seed: int, step: int, prompt_id: int, sample: int) -> int:
    """Seed of one response, 63 bit: a pure function, so that a step can be replayed."""
    words = b"".join(value.to_bytes(8, "little") for value in (run_seed, step, prompt_id, sample))
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


class Engine:
    """In-process vLLM with the drafter-invariant sampler. Construction is collective over the process group's ranks."""

    def __init__(
        self,
        policy_dir: Path,
        drafter_dir: Path | None,
        *,
        config: Config,
        seed: int,
        speculate: bool = True,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the engine and test its sampler.

        Args:
            policy_dir: Hugging Face directory; refits keep its architecture.
            drafter_dir: EAGLE-3 directory, for `speculation.method = "eagle3"`.
            config: model, engine, speculation sections are read.
            seed: of vLLM's own generators; no response depends on it.
            speculate: draft as `speculation` says; otherwise decode plainly.
            overrides: vLLM engine arguments that replace the project's.

        Raises:
            ValueError: EAGLE-3 without a drafter.
            SamplerError: the sampler's self-test failed.
        """
        os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
        if not dist.is_initialized():
            join()
        vllm_patch.require_version()
        self.config = config
        self.max_length = config.model.max_length
        self.max_k = config.speculation.k if speculate else 0
        self.k = self.max_k
        arguments = engine_arguments(config, policy_dir, drafter_dir, seed, self.max_k)
        self._llm = vllm_patch.start({**arguments, **(overrides or {})})
        self._runner = vllm_patch.model_runner(self._llm)
        vllm_patch.refuse_shared_head(self._runner)
        self._sampler = vllm_patch.InvariantSampler(self._runner, self.max_k)
        self._sampler.install()
        self._tokenizer = self._llm.get_tokenizer()
        self._stop_tokens = stop_tokens(policy_dir, self._tokenizer)
        self._policy_names = weight_names(policy_dir)
        self._drafter_names = weight_names(drafter_dir) if self._drafter is not None and drafter_dir else frozenset()
        self._num_requests = 0
        self.version = 0
        """Version of the weights it holds, as given to `refit`."""
        self.self_test()

    @property
    def _drafter(self) -> torch.nn.Module | None:
        return vllm_patch.draft_model(self._runner)

    def generate(self, requests: list[Request], on_progress: Callable[[int, int], None] | None = None) -> Generation:
        """Answer all requests; `on_progress(finished, total)` is called whenever some finish.

        Raises:
            ValueError: a prompt that leaves no room for a token within `model.max_length`.
        """
        started = time.perf_counter()
        stats, self._sampler.stats = self._sampler.stats, SpeculationStats()
        running: dict[str, tuple[int, str]] = {}
        responses: dict[int, Response] = {}
        params = [self._sampling_params(request) for request in requests]
        try:
            for index, (request, param) in enumerate(zip(requests, params, strict=True)):
                name, internal = self._add(request.prompt_tokens, param)
                running[name] = (index, internal)
            while running:
                finished = [output for output in self._llm.step() if output.finished]
                for output in finished:
                    index, internal = running.pop(output.request_id)
                    responses[index] = self._response(output, self._sampler.records.pop(internal))
                if finished and on_progress is not None:
                    on_progress(len(responses), len(requests))
        finally:
            self._abort(internal for _, internal in running.values())
            stats, self._sampler.stats = self._sampler.stats, stats
        ordered = [responses[index] for index in range(len(requests))]
        num_tokens = sum(len(response.tokens) for response in ordered)
        return Generation(ordered, stats, time.perf_counter() - started, num_tokens)

    def set_k(self, k: int) -> None:
        """Draft `k` tokens from the next iteration on, 0 to `speculation.k`."""
        if not 0 <= k <= self.max_k:
            raise ValueError(f"k = {k} is outside 0 to {self.max_k}, the k this engine was started with")
        if self.max_k:
            vllm_patch.set_draft_length(self._llm, k)
        self.k = k

    @property
    def speculates(self) -> bool:
        """Whether it was started with a draft source."""
        return self.max_k > 0

    def reset_prefix_cache(self) -> None:
        """Forget all prompts, so that the next generation prefills each anew."""
        self._llm.reset_prefix_cache()

    def refit(self, policy_weights: Weights, drafter_weights: Weights | None, version: int) -> float:
        """Load new weights in place, by their on-disk names, and drop cached prefixes; returns seconds.

        A tensor is read until the fused layer it belongs to is complete: the caller must not overwrite it before.

        Raises:
            RefitError: a tensor is missing or unknown; PolicyParityError: a tied head differs from the embeddings.
        """
        started = time.perf_counter()
        assert not self._llm.has_unfinished_requests(), "refit while generating"
        tied = bool(self._llm.model_config.hf_config.tie_word_embeddings)
        refit_policy(self._llm.vllm_config, self._runner.model, policy_weights, self._policy_names, tied)
        if drafter_weights is not None and self._drafter is not None:
            refit_drafter(self._llm.vllm_config, self._drafter, drafter_weights, self._drafter_names)
        self.reset_prefix_cache()
        self.version = version
        return time.perf_counter() - started

    def verify_policy(self, weights: Weights) -> None:
        """Compare the policy inside the engine with the trainer's tensors, one by one; slower than the parity probe.

        Raises:
            PolicyParityError: names the tensors that differ.
        """
        if wrong := differing_tensors(self._runner.model, weights, drafter=False):
            raise PolicyParityError(f"the engine's policy differs from the trainer's in {', '.join(wrong)}")

    def verify_drafter(self, weights: Weights) -> None:
        """Compare the drafter inside the engine with the trainer's tensors, and its embeddings with the policy's.

        Raises:
            DrafterCollapseError: names the tensors that differ.
        """
        drafter = self._drafter
        if drafter is None:
            return
        wrong = differing_tensors(drafter, weights, drafter=True)
        embeddings: Any = drafter.get_submodule("model.embed_tokens")
        if not torch.equal(embeddings.weight, self._runner.model.model.embed_tokens.weight):
            wrong.append("embed_tokens.weight")
        if wrong:
            raise DrafterCollapseError(f"the engine's drafter differs from the trainer's in {', '.join(wrong)}")

    def sequence_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of `tokens[1:]` of each sequence at temperature 1, from prefills without cached prefixes."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if any(len(tokens) > self.max_length for tokens in sequences):
            raise ValueError(f"a sequence is longer than model.max_length = {self.max_length}")
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **vllm_patch.seed_argument(0),
        )
        running = {name: (i, key) for i, (name, key) in enumerate(self._add(tokens, params) for tokens in sequences)}
        results: dict[int, list[float]] = {}
        while running:
            for output in self._llm.step():
                index, internal = running.pop(output.request_id)
                self._sampler.records.pop(internal)
                pairs = zip(output.prompt_logprobs[1:], sequences[index][1:], strict=True)
                results[index] = [float(entry[token].logprob) for entry, token in pairs]
        return [results[index] for index in range(len(sequences))]

    def self_test(self) -> None:
        """Crafted logits and drafts through the installed sampler, against a reference that shares no code with it.

        Raises:
            SamplerError: a token, a log-prob or a counter is not what it must be.
        """
        with CraftedInputs(self._runner, self._llm.model_config.get_vocab_size(), self._stop_tokens) as crafted:
            cases = crafted.requests()
            generation = self.generate(
                [Request(c.prompt_tokens, c.seed, c.max_tokens, c.temperature, c.top_p, c.top_k) for c in cases]
            )
        # Tokens were put into cached blocks that the crafted drafts, not the model's inputs, name.
        self._llm.reset_prefix_cache()
        for case, response in zip(cases, generation.responses, strict=True):
            crafted.check_logprobs(case, response.tokens, response.logprobs)
        crafted.check_counters(generation.stats, self.k)

    def shutdown(self) -> None:
        """Free the engine; the process group stays."""
        vllm_patch.stop(self._llm)

    def _sampling_params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self.max_length - len(request.prompt_tokens)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(request.prompt_tokens)} tokens leaves no room for a response within "
                f"model.max_length = {self.max_length}; raise it or leave the prompt out"
            )
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            **vllm_patch.seed_argument(request.seed),
            max_tokens=min(request.max_tokens, room),
            stop_token_ids=self._stop_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _add(self, prompt_tokens: list[int], params: Any) -> tuple[str, str]:
        """Queue a request; its name in outputs, and the engine's own."""
        name = str(self._num_requests)
        self._num_requests += 1
        return name, self._llm.add_request(name, {"prompt_token_ids": prompt_tokens}, params)

    def _abort(self, internal: Iterable[str]) -> None:
        names = list(internal)
        if names:
            self._llm.abort_request(names, internal=True)
        for name in names:
            self._sampler.records.pop(name, None)

    def _response(self, output: Any, record: vllm_patch.RequestRecord) -> Response:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        # Tokens accepted past the end of a response were picked too, and are cut off.
        assert len(record.logprobs) >= len(tokens)
        return Response(
            tokens=tokens,
            logprobs=record.logprobs[: len(tokens)],
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            finish_reason=completion.finish_reason,
            num_drafts=record.num_drafts,
            num_draft_tokens=record.num_draft_tokens,
            num_accepted_tokens=record.num_accepted_tokens,
            started_at=record.started_at,
            finished_at=time.time(),
        )
