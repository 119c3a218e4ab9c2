"""What vLLM drafts with a saved drafter is what the module computes: same slots, positions, features and weights."""

from __future__ import annotations

import json
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Any

import llvmlite.binding  # noqa: F401  (as other tests of a worker import it)
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import DrafterConfig
from specrl.distributed import Ranks
from specrl.export.card import ExportedDrafter
from specrl.export.formats import FORMATS
from specrl.models.drafters import NORM_FLAGS
from specrl.models.rope import rope_frequencies
from specrl.rollout.vllm import replacements
from specrl.rollout.vllm.engine import lifecycle
from specrl.training.drafter.io import adopt_drafter
from specrl.training.drafter.kinds.eagle3 import Eagle3, Eagle3Shape
from specrl.training.drafter.trainer import Drafter, choose_draft_vocabulary, count_tokens
from specrl.training.features import Features
from tests.literal_drafting import LiteralDrafter

VOCAB, PROMPT, RESPONSE, K = 120, 6, 24, 3
ALONE = Ranks(0, 1, 0, torch.device("cpu"))

pytestmark = pytest.mark.engine


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
PUBLISHED = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "draft_vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 32,
    "eagle_aux_hidden_state_layer_ids": [0, 3, 4, 6],
    **dict.fromkeys(NORM_FLAGS, True),
}


SHORT = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT},
        {"rope_type": "yarn", "factor": 4.0, **SHORT},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False, **SHORT},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, **SHORT},
    ],
)
def test_policy_and_drafter_rotate_as_the_engine_does(scaling: dict[str, Any]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = {"rope_theta": 1e6, **scaling}
    with set_current_vllm_config(VllmConfig()):
        cos_and_sin = get_rope(64, 256, rope_parameters=dict(rope), dtype=torch.float32).cos_sin_cache
    frequencies, scale = rope_frequencies(rope, 64, 256)
    angles = torch.outer(torch.arange(256.0), frequencies)
    assert torch.equal(cos_and_sin[:256], torch.cat((angles.cos(), angles.sin()), -1) * scale)


def write_policy(directory: Path, rope: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters=rope,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def greedy_features(policy_dir: Path, prompts: Tensor, layers: tuple[int, ...]) -> Features:
    """Greedy responses of the policy, and the features of its own forward pass over them."""
    policy = LlamaForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    tokens = prompts
    with torch.no_grad():
        for _ in range(RESPONSE):
            tokens = torch.cat([tokens, policy(tokens).logits[:, -1:].argmax(-1)], 1)
        outputs = policy(tokens, output_hidden_states=True)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[:, PROMPT - 1 : -1] = True
    streams = dict(enumerate(outputs.hidden_states)) | {6: last_layer_output(policy, tokens)}
    hidden = torch.cat([streams[layer] for layer in layers], -1)
    return Features(tokens, mask, hidden, outputs.logits.argmax(-1), torch.zeros(len(tokens), dtype=torch.int64))


def last_layer_output(policy: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """The residual stream behind the last layer; the last of transformers' hidden states is behind the final norm."""
    found: list[Tensor] = []
    hook = policy.model.norm.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    with torch.no_grad():
        policy(tokens)
    hook.remove()
    return found[0]


SHAPES = {
    "published": {"draft_vocab_size": 100},
    "two layers, four features, whole vocabulary, window": {
        "draft_vocab_size": VOCAB,
        "num_layers": 2,
        "feature_layers": [1, 3, 4, 6],
        "sliding_window": 16,
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_vllm_drafts_what_the_module_drafts(
    shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_dir = write_policy(tmp_path / "policy", {"rope_type": "default", "rope_theta": 500.0})
    config = DrafterConfig.model_validate(shape)
    vocabulary = choose_draft_vocabulary(count_tokens([], VOCAB), config.draft_vocab_size)
    drafter = Drafter.create(policy_dir, config, vocabulary, ALONE)
    check_drafts(drafter, policy_dir, tmp_path, monkeypatch, "speculators")


def test_vllm_drafts_what_a_published_drafter_with_all_norms_and_yarn_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_dir = write_policy(tmp_path / "policy", YARN)
    shape = Eagle3Shape.from_config(PUBLISHED | {"rope_parameters": YARN, "sliding_window": None}, torch.float32)
    torch.manual_seed(1)
    tensors = Eagle3(shape).state_dict()
    ids = torch.arange(20, VOCAB)
    drafted = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(json.dumps(PUBLISHED))
    save_file({**tensors, "d2t": ids, "t2d": drafted}, tmp_path / "published" / "model.safetensors")
    notes = adopt_drafter(tmp_path / "published", policy_dir, tmp_path / "adopted")
    assert "its rotary embedding is not scaled, the policy's is: it takes over YaRN with factor 8" in notes
    drafter = Drafter.load(tmp_path / "adopted", policy_dir, DrafterConfig(), ALONE)
    check_drafts(drafter, policy_dir, tmp_path, monkeypatch)


def check_drafts(
    drafter: Drafter, policy_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, form: str = "eagle3"
) -> None:
    """Train the drafter, and compare what vLLM drafts with it to what the module drafts, draft by draft.

    Args:
        form: The format of the folder that vLLM loads.
    """
    vocabulary = drafter.draft_tokens
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCAB, (48, PROMPT), generator=generator)
    drafter.update([greedy_features(policy_dir, prompts, drafter.feature_layers)], lr=3e-3, epochs=60)
    drafter.save(folder / "drafter", policy_version=0)
    drafter = Drafter.load(folder / "drafter", policy_dir, drafter.config, ALONE)
    features = greedy_features(policy_dir, prompts[:4], drafter.feature_layers)

    FORMATS[form].write(ExportedDrafter(folder / "drafter", policy_dir, str(policy_dir), K), folder / form)
    proposals, alone = vllm_proposals(policy_dir, folder / form, features.tokens, monkeypatch)
    literal = LiteralDrafter(drafter.model, drafter.model.embeddings)
    compared = 0
    for row, by_start in enumerate(proposals):
        for start, drafts in by_start.items():
            if start + 1 < features.tokens.shape[1]:
                tokens = features.tokens[row].tolist()
                assert drafts == literal.draft(tokens, features.hidden[row], start, K, vocabulary), (row, start)
                compared += 1
    assert compared > 20
    expected = drafter.update([features], lr=0.0)["acceptance_length"]
    assert expected > 1.3, "a drafter that is never right would test little"
    assert length(alone) == pytest.approx(expected, rel=0.02)


def length(counts: list[int]) -> float:
    """The acceptance length."""
    return 1 + sum(counts[1:]) / counts[0]


def vllm_proposals(
    policy_dir: Path, drafter_dir: Path, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[int, list[int]]], list[int]]:
    """Decode greedily, one request after another and then all at once.

    Returns:
        Drafts by starting slot for each request; `[drafts, accepted at position 0, 1, 2]` of all together.
    """
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    from vllm import LLM, SamplingParams

    replacements.install()
    engine = LLM(
        str(policy_dir),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        async_scheduling=False,
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=True,
        disable_log_stats=False,
        speculative_config=speculative_config(policy_dir, drafter_dir),
    )
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    propose, proposals = runner.speculator.text._propose, []  # vLLM's own, as its server has it

    def record(batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        drafts: Tensor = propose(batch, *args, **kwargs)
        length = int(runner.req_states.total_len.gpu[batch.idx_mapping[0]])
        proposals[-1][length - 2] = drafts[0].tolist()  # by the position of the last token that the drafter read
        return drafts

    runner.speculator.propose = record
    # They go on for a draft, since nothing is accepted beyond a response's end.
    parameters = SamplingParams(temperature=0.0, max_tokens=RESPONSE + K, ignore_eos=True, detokenize=False)
    counts = [0] * (1 + K)
    for row in tokens.tolist():
        proposals.append({})
        output = engine.generate({"prompt_token_ids": row[:PROMPT]}, parameters, use_tqdm=False)[0]
        longer = row[:PROMPT] + list(output.outputs[0].token_ids)
        assert longer[: len(row)] == row
        for start, drafts in proposals[-1].items():
            if start + 2 < len(row):
                right = takewhile(lambda pair: pair[0] == pair[1], zip(drafts, longer[start + 2 :], strict=False))
                accepted = len(list(right))
                counts = [counts[0] + 1, *(counts[1 + i] + (i < accepted) for i in range(K))]
    alone = counters(engine)
    runner.speculator.propose = propose
    prompts = [{"prompt_token_ids": row[:PROMPT]} for row in tokens.tolist()]
    engine.generate(prompts, parameters, use_tqdm=False)
    together = [after - before for after, before in zip(counters(engine), alone, strict=True)]
    assert together == alone, "running requests together must not change what is drafted and accepted"
    lifecycle.stop(engine.llm_engine)
    dist.destroy_process_group()  # vLLM's own, which no variable of the environment tells of
    return proposals, counts


def speculative_config(policy_dir: Path, drafter_dir: Path) -> Any:
    """As the command has it that serves the drafter, or as vLLM reads it of the format of `speculators`."""
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    config = json.loads((drafter_dir / "config.json").read_text())
    if "speculators_config" in config:
        return SpeculatorsConfig.extract_vllm_speculative_config(config) | {"model": str(drafter_dir)}
    command = FORMATS["eagle3"].command(ExportedDrafter(drafter_dir, policy_dir, str(policy_dir), K), drafter_dir)
    words = shlex.split(command)
    return json.loads(words[words.index("--speculative-config") + 1])


def counters(engine: Any) -> list[int]:
    metrics = {metric.name.rsplit("spec_decode_", 1)[-1]: metric for metric in engine.get_metrics()}
    return [metrics["num_drafts"].value, *metrics["num_accepted_tokens_per_pos"].values]
