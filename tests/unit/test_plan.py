"""The plan counts jobs and memory without a GPU, and refuses what cannot fit."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from specrl.config import STAGES, Config, ConfigError, load_config, parse_config
from specrl.config.rollout import batched_tokens
from specrl.models.shapes import KNOWN_SHAPES, model_shape
from specrl.projection.budgets import Budget
from specrl.projection.memory import MARGIN, MemoryItem, Rank, activations, kv_bytes_per_token, peak_gib
from specrl.projection.plan import Plan, disk_bytes, plan
from specrl.report.projection import print_plan

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def configured(**sections: object) -> Config:
    return parse_config({"name": "run", **sections})


def printed(made: Plan) -> str:
    text = StringIO()
    print_plan(made, {}, Console(file=text))
    return text.getvalue()


def needed(made: Plan, stage: str, place: str) -> float:
    return next(budget.needed_gib for budget in made.budgets if (budget.stage, budget.place) == (stage, place))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_fits_and_its_plan_names_every_stage(path: Path) -> None:
    config = load_config(path)
    made = plan(config)
    assert all(budget.needed_gib <= budget.available_gib for budget in made.budgets)
    text = printed(made)
    assert all(word in text for word in ("policy weights", "KV cache", config.name, *STAGES))


def test_the_large_configurations_ask_for_the_gpus_they_name() -> None:
    plans = [plan(load_config(ROOT / "configs" / f"qwen3-8b-rl-{name}.toml")) for name in ("zero", "think")]
    rows = [
        next(line.split() for line in printed(made).splitlines() if line.split()[:1] == ["train"]) for made in plans
    ]
    nodes, gpus = zip(*((int(row[1]), int(row[3])) for row in rows), strict=True)
    assert (nodes, gpus) == ((1, 4), (8, 32))
    assert rows[0][-1] == "gpu"


def test_known_shapes_have_the_published_number_of_parameters() -> None:
    assert KNOWN_SHAPES["Qwen/Qwen3-8B"].parameters == 8_190_735_360
    assert KNOWN_SHAPES["Qwen/Qwen3-32B"].parameters == 32_762_123_264
    assert KNOWN_SHAPES["smollm2-135m"].parameters == 134_515_008


def test_experts_count_once_each_and_only_those_of_a_token_are_active() -> None:
    dense, small, large = (KNOWN_SHAPES[f"Qwen/Qwen3-{name}"] for name in ("8B", "30B-A3B", "235B-A22B"))
    assert (small.parameters, small.active_parameters) == (30_532_122_624, 3_353_032_704)
    assert (large.parameters, large.active_parameters) == (235_093_634_560, 22_190_763_520)
    assert dense.active_parameters == dense.parameters


def test_weights_gradients_and_optimizer_take_their_textbook_bytes() -> None:
    made = plan(configured(resources={"ranks_per_node": 2}))
    items = {item.name: item.gib * 2**30 for budget in made.budgets if budget.stage == "train" for item in budget.items}
    # Untied heads and tied embeddings aside, everything counts the same parameters; the last norm is left out.
    parameters = items["policy weights"] / 2
    assert parameters == pytest.approx(134_515_008, rel=1e-4)
    assert items["gradients"] == pytest.approx(4 * parameters)
    assert items["masters and Adam moments"] == pytest.approx(12 * parameters / 2)


def test_tensor_parallelism_shards_weights_and_data_parallelism_the_optimizer() -> None:
    path = ROOT / "configs" / "qwen3-8b-rl-zero.toml"
    four, eight = (load_config(path, [f"policy.tensor_parallel={size}"]) for size in (4, 8))

    def items(config: Config) -> dict[str, float]:
        budgets = plan(config).budgets
        return {item.name: item.gib for budget in budgets if budget.stage == "train" for item in budget.items}

    small, large = items(eight), items(four)
    assert small["policy weights"] == pytest.approx(large["policy weights"] / 2)
    assert small["gradients"] == pytest.approx(large["gradients"] / 2)
    # Twice the tensor parallelism is half the data parallelism: the optimizer's share stays.
    assert small["masters and Adam moments"] == pytest.approx(large["masters and Adam moments"])


def test_the_drafters_features_are_bounded_by_their_budget() -> None:
    def features(config: Config) -> float:
        [train] = [budget for budget in plan(config).budgets if budget.stage == "train"]
        return next(item.gib for item in train.items if item.name == "drafter's features")

    small, large = (configured(drafter={"max_tokens_per_step": size}) for size in (2048, 8192))
    assert features(large) == pytest.approx(4 * features(small))
    # 16 x 4 responses of at most 512 tokens: a budget above that is never filled.
    assert features(configured(drafter={"max_tokens_per_step": 10**5})) == pytest.approx(16 * features(small))


def test_pretraining_needs_its_window_of_features() -> None:
    def items(stage: str, **drafter: int) -> dict[str, float]:
        [budget] = [budget for budget in plan(configured(drafter=drafter)).budgets if budget.stage == stage]
        return {item.name: item.gib for item in budget.items}

    small, large = (items("pretrain", max_tokens_per_window=size) for size in (8192, 32768))
    assert large["drafter's features"] == pytest.approx(4 * small["drafter's features"])
    # 160 x 2 responses of at most 512 tokens: a window above that is never filled.
    assert items("pretrain", max_tokens_per_window=170_000) == items("pretrain", max_tokens_per_window=160 * 2 * 512)


def test_idle_training_keeps_the_features_of_more_steps() -> None:
    def features(use: str) -> float:
        made = plan(configured(bubbles={"use": use}, speculation={"method": "eagle3+replay"}))
        [train] = [budget for budget in made.budgets if budget.stage == "train"]
        return next(item.gib for item in train.items if item.name == "drafter's features")

    assert features("train_drafter") == pytest.approx(3 * features("none"))


def test_an_engine_that_sleeps_leaves_the_trainer_the_whole_gpu() -> None:
    path = ROOT / "configs" / "qwen3-8b-rl-zero.toml"
    small = "engine.gpu_memory_fraction=0.35"
    made = {sleeps: plan(load_config(path, [small, f"engine.sleep={sleeps}"])) for sleeps in ("false", "true")}

    def found(sleeps: str, place: str) -> Budget:
        budgets = made[sleeps].budgets
        return next(budget for budget in budgets if (budget.stage, budget.place) == ("train", place))

    assert found("true", "GPU, trainer").available_gib > found("false", "GPU, trainer").available_gib + 10
    assert found("true", "GPU, engine").available_gib == found("false", "GPU, engine").available_gib
    # What vLLM copies the weights to is pinned, and rounded up to powers of two.
    weights = sum(item.gib for item in found("true", "GPU, engine").items if item.name == "engine weights")
    assert found("true", "host").needed_gib > found("false", "host").needed_gib + 2 * weights - 1e-6


def test_a_drafter_that_trains_in_bubbles_does_so_beside_an_engine_that_is_awake() -> None:
    path = ROOT / "configs" / "qwen3-8b-rl-zero.toml"

    def phases(use: str) -> dict[str, float]:
        engine = ["engine.sleep=true", "engine.tensor_parallel=1", "engine.gpu_memory_fraction=0.28"]
        made = plan(load_config(path, [*engine, "drafter.ttt_steps=2", f'bubbles.use="{use}"']))
        items = next(item.items for item in made.budgets if (item.stage, item.place) == ("train", "GPU, trainer"))
        names = ("drafter", "generation")
        return {name: sum(item.gib for item in items if item.phase == name) for name in names}

    trains, waits = phases("train_drafter"), phases("none")
    assert trains["generation"] == pytest.approx(waits["generation"] + trains["drafter"])


def test_recompute_trades_activations_for_compute() -> None:
    def peak(*, recompute: bool) -> float:
        policy = {"recompute": recompute, "tokens_per_micro_batch": 8192}
        return needed(plan(configured(policy=policy, resources={"memory_gib_per_rank": 64})), "train", "host")

    assert peak(recompute=True) < peak(recompute=False) - 1


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from([None, "policy", "drafter"])), max_size=8))
def test_the_peak_lies_between_what_stays_and_everything_together(parts: list[tuple[float, str | None]]) -> None:
    items = [MemoryItem("item", gib, "", phase) for gib, phase in parts]
    resident = sum(item.gib for item in items if item.phase is None)
    assert resident - 1e-9 <= peak_gib(items) <= sum(item.gib for item in items) + 1e-9


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["engine.gpu_memory_fraction=0.9"], ["train", "GPU, trainer", "engine.gpu_memory_fraction"]),
        (["policy.tokens_per_micro_batch=262144"], ["train", "GPU, trainer", "policy.tokens_per_micro_batch"]),
        (["engine.gpu_memory_fraction=0.05"], ["KV cache", "9216", "engine.gpu_memory_fraction"]),
        (["resources.memory_gib_per_rank=8"], ["train", "host", "resources.memory_gib_per_rank"]),
        (["model.max_length=65536"], ["model.max_length = 65536", "32768 positions"]),
        (["model.source=org/other"], ["model.source", "org/other", "hf download"]),
        (["model.source=/absent/model"], ["/absent/model", "does not exist"]),
        (["drafter.draft_vocab_size=151937"], ["drafter.draft_vocab_size = 151937", "151936 tokens"]),
        (["drafter.feature_layers=[2,37]"], ["drafter.feature_layers = [2, 37]", "36 layers"]),
    ],
)
def test_what_cannot_run_is_refused_with_the_key_that_mends_it(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan(load_config(ROOT / "configs" / "qwen3-8b-rl-zero.toml", overrides))
    assert [part for part in parts if part not in str(error.value)] == []


def test_parallel_sizes_must_divide_heads_and_layers() -> None:
    sizes = {"resources": {"ranks_per_node": 4}, "policy": {"tensor_parallel": 2}, "engine": {"tensor_parallel": 4}}
    with pytest.raises(ConfigError) as error:
        plan(configured(**sizes))
    lines = str(error.value).splitlines()
    assert lines[0].startswith("policy.tensor_parallel = 2 does not divide the 9 attention and 3 KV heads")
    assert lines[1].startswith("engine.tensor_parallel = 4 does not divide")
    with pytest.raises(ConfigError, match="heads of 16 channels; on CPUs vLLM allows 32, 64"):
        plan(configured(model={"source": "tiny", "tiny": {"num_heads": 8}}, drafter={"draft_vocab_size": 64}))
    with pytest.raises(ConfigError, match="pipeline_parallel = 4 does not divide the 30 layers"):
        plan(configured(resources={"ranks_per_node": 4}, policy={"pipeline_parallel": 4}))


def test_a_local_directory_is_read_for_its_shape(tmp_path: Path) -> None:
    hf = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    }
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    shape = model_shape(configured(model={"source": str(tmp_path)}).model)
    assert shape.parameters == 494_032_768  # Qwen2.5-0.5B
    assert shape.head_dim == 64


def test_a_cache_smaller_than_all_requests_is_noted_and_smaller_than_one_refused() -> None:
    assert "sequences of full length" in printed(plan(configured(engine={"kv_cache_gib": 0.25})))
    with pytest.raises(
        ConfigError, match=r"one sequence of model\.max_length = 512 needs .* raise engine\.kv_cache_gib"
    ):
        plan(configured(engine={"kv_cache_gib": 0.001}))


def items_of(made: Plan, place: str) -> dict[str, float]:
    [budget] = [budget for budget in made.budgets if (budget.stage, budget.place) == ("train", place)]
    return {item.name: item.gib for item in budget.items}


def test_an_engine_in_fp8_holds_half_the_weights_and_twice_the_tokens() -> None:
    path = ROOT / "configs" / "qwen3-8b-rl-zero.toml"

    def engine(generation: str, kv_cache: str) -> tuple[dict[str, float], float]:
        precision = [f'precision.generation="{generation}"', f'precision.kv_cache="{kv_cache}"']
        config = load_config(path, [*precision, "engine.max_num_seqs=16"])
        rank = Rank(model_shape(config.model), config, gpu=1, data_parallel=2)
        return items_of(plan(config), "GPU, engine"), kv_bytes_per_token(rank)

    (fp8, small), (bf16, large) = engine("fp8", "fp8"), engine("bf16", "bf16")
    linear = 36 * KNOWN_SHAPES["Qwen/Qwen3-8B"].linear_parameters_per_layer / 2**30
    assert bf16["engine weights"] - fp8["engine weights"] == pytest.approx(linear)
    assert large / small == pytest.approx(2 * 37 / 38)  # the drafter's layer stays in BF16
    assert fp8["KV cache"] > bf16["KV cache"] + 0.9 * linear


def test_before_the_drafter_is_pretrained_the_engine_has_the_gpu_to_itself() -> None:
    made = plan(load_config(ROOT / "configs" / "qwen3-8b-rl-zero.toml"))
    available = {(budget.stage, budget.place): budget.available_gib for budget in made.budgets}
    assert available["pretrain", "GPU, engine"] == pytest.approx(0.86 * 79)
    assert available["pretrain", "GPU, trainer"] == 79
    assert available["train", "GPU, engine"] < 0.6 * 79


def transfers(config: Config) -> dict[str, tuple[float, float]]:
    return {item.name: (item.inside_gib, item.network_gib) for item in plan(config).traffic}


def test_what_a_step_sends_follows_from_the_layout() -> None:
    path = ROOT / "configs" / "qwen3-8b-rl-zero.toml"
    one = transfers(load_config(path))
    assert sum(network for _, network in one.values()) == 0  # all on one node
    parameters = 8_190_735_360 / 4
    assert one["gradients and new weights"][0] == pytest.approx(parameters * 6 / 2 / 2**30, rel=1e-3)
    two = transfers(load_config(path, ["stage_resources.train.nodes=2"]))
    # Two of a node's ranks hold each shard: its ring of four ranks enters the node twice.
    inside, network = two["gradients and new weights"]
    assert inside == pytest.approx(network)
    assert inside + network == pytest.approx(parameters * 6 * 3 / 4 / 2**30, rel=1e-3)
    assert two["tensor parallel"][1] == 0
    assert two["tensor parallel"][0] == pytest.approx(one["tensor parallel"][0] / 2)
    # Weights go to the engine whole, and a rank has its own part already.
    assert one["refit over ranks of a stage"][0] == pytest.approx(8_190_735_360 * 2 * 3 / 4 / 2**30, rel=1e-3)


def test_a_run_needs_room_for_the_drafters_in_its_checkpoints_and_for_policies_of_its_type() -> None:
    config = parse_config({"name": "x", "model": {"source": "tiny"}, "drafter": {"draft_vocab_size": 64}})
    shape, made = model_shape(config.model), plan(config).checkpoint
    needed = disk_bytes(config, shape)
    assert needed == pytest.approx(made.number * made.gib * 2**30 + 3 * 2 * shape.parameters + 2**30, abs=1)
    without = config.updated(speculation={"method": "none", "k": 0}, bubbles={"use": "none"})
    drafters = made.number * (made.gib - plan(without).checkpoint.gib) * 2**30
    assert needed - disk_bytes(without, shape) == pytest.approx(drafters, abs=1) and drafters > 0
    assert disk_bytes(config.updated(model={"dtype": "float32"}), shape) == needed + 3 * 2 * shape.parameters


def test_speeds_are_printed_and_can_be_set() -> None:
    made = plan(load_config(ROOT / "configs" / "qwen3-8b-rl-zero.toml", ["cluster.disk_gb_per_s=10"]))
    text = printed(made)
    assert "10 GB/s to the disk" in text and "40 GB/s for each rank between nodes" in text
    assert made.checkpoint.write_s == pytest.approx(made.checkpoint.gib * 2**30 / 10e9)
    assert made.checkpoint.gib * 2**30 == pytest.approx(12 * (8_190_735_360 + 2 * 400e6), rel=0.01)
    assert "checkpoint: " in text and "gradients and new weights" in text


@pytest.mark.parametrize(
    "overrides",
    [["engine.gpu_memory_fraction=0.9"], ["resources.memory_gib_per_rank=8"], ["policy.tokens_per_micro_batch=262144"]],
)
def test_a_refused_plan_says_what_would_fit(overrides: list[str]) -> None:
    path = ROOT / "configs" / "qwen3-8b-rl-zero.toml"
    with pytest.raises(ConfigError, match="this would fit: --set ") as error:
        plan(load_config(path, overrides))
    changes = str(error.value).splitlines()[-1].partition(": ")[2].split("--set ")[1:]
    assert plan(load_config(path, [*overrides, *(change.strip() for change in changes)])).budgets


def test_a_batch_verifies_all_drafts_at_once() -> None:
    assert batched_tokens(8, 0) == 2048
    assert batched_tokens(128, 16) == 128 * 17


def test_planning_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from pathlib import Path; from specrl.config import load_config; "
        "from specrl.projection.plan import plan; plan(load_config(Path('configs/quickstart.toml'))); "
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def expert_plan(*overrides: str) -> Plan:
    """The plan of Qwen3-235B-A22B on 64 nodes, without bubbles."""
    return plan(load_config(ROOT / "configs" / "qwen3-235b-a22b.toml", list(overrides)))


def test_235b_on_64_nodes_has_the_bytes_that_its_layout_gives() -> None:
    made = expert_plan()
    shape, items, engine = made.shape, items_of(made, "GPU, trainer"), items_of(made, "GPU, engine")
    experts = 94 * 128 * 3 * 4096 * 1536
    assert shape.parameters == pytest.approx(235.1e9, rel=1e-3)
    assert shape.active_parameters == pytest.approx(22.2e9, rel=1e-2)
    assert made.config.resources_of("train").ranks == 512
    own = experts / 2 / 32 + (shape.parameters - experts) / 2 / 4  # two stages; experts over 32 ranks, the rest over 4
    assert items["policy weights"] * 2**30 == pytest.approx(2 * own, rel=0.02)
    assert items["gradients"] == pytest.approx(2 * items["policy weights"])
    # All ranks together hold the optimizer once: 12 bytes for each parameter.
    assert 512 * items["masters and Adam moments"] * 2**30 == pytest.approx(12 * shape.parameters, rel=0.02)
    assert engine["engine weights"] * 2**30 == pytest.approx(shape.parameters / 4, rel=0.02)  # FP8 on 4 GPUs
    assert made.checkpoint.gib * 2**30 == pytest.approx(12 * shape.parameters, rel=0.01)
    assert made.notes == ()


def test_twice_the_expert_parallelism_is_half_the_experts_of_a_rank() -> None:
    path = ROOT / "configs" / "qwen3-235b-a22b.toml"

    def rank(size: int) -> Rank:
        config = load_config(path, [f"policy.expert_parallel={size}", "resources.nodes=16"])
        return Rank(model_shape(config.model), config, gpu=1, data_parallel=64)

    small, large = rank(64), rank(32)
    assert small.expert_parameters == large.expert_parameters / 2
    assert small.shared_parameters == large.shared_parameters
    assert small.optimizer_parameters == large.optimizer_parameters  # half as many ranks hold the same experts
    assert activations(small, trainable=True) == activations(large, trainable=True)


def test_experts_of_one_node_send_no_tokens_over_the_network() -> None:
    path = ROOT / "configs" / "qwen3-30b-a3b.toml"

    def tokens(*overrides: str) -> tuple[float, float]:
        return transfers(load_config(path, list(overrides)))["tokens to experts and back"]

    inside, network = tokens()
    assert network == 0 and inside > 0
    across = tokens("policy.expert_parallel=16", "resources.nodes=4")
    assert across[1] == pytest.approx(across[0] * 8 / 7)  # of 15 other ranks, 8 are on another node


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.expert_parallel=3"], "policy.expert_parallel = 3 does not divide the 256 ranks of a pipeline stage"),
        (["engine.tensor_parallel=8"], "the 1536 rows of an expert .* in 8 parts cut through FP8 blocks of 128"),
        (["model.source=Qwen/Qwen3-8B", "policy.pipeline_parallel=1"], "policy.expert_parallel = 32: .* no experts"),
    ],
)
def test_layouts_that_do_not_suit_experts_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expert_plan(*overrides)


def test_a_refit_holds_the_experts_of_a_layer_while_the_engine_waits_for_the_last_one() -> None:
    buffer = items_of(expert_plan(), "GPU, trainer")["refit buffer"]
    layer = 128 * 3 * 4096 * 1536 * 2 / 2**30
    assert layer * (1 + 1 / 4) < buffer < layer * 1.5


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_leaves_a_part_of_each_gpu_free(path: Path) -> None:
    made = plan(load_config(path))
    free: dict[str, float] = {}
    for stage in STAGES:
        gpu = made.config.resources_of(stage).gpu_memory_gib
        for budget in made.budgets:
            if budget.stage == stage and budget.place == "GPU, trainer":
                free[stage] = (budget.available_gib - budget.needed_gib) / gpu
    assert all(share >= MARGIN for share in free.values()), free
    assert (free != {}) == path.stem.startswith("qwen3")


def test_a_plan_says_what_a_preset_stands_for_and_what_a_penalty_costs() -> None:
    def lines(**train: object) -> list[str]:
        return [line for line in printed(plan(configured(train=train))).splitlines() if line.startswith("train.")]

    assert lines(algorithm="dapo")[3:] == [
        "train.loss_mean = token",
        "train.refill_rounds = 9",
        "train.overlong_filter = true",
        "train.overlong_window = 0.2",
    ]
    assert lines(kl_coef=0.1, reference_every=7)[4:] == [
        "train.kl_coef = 0.1",
        "train.kl_estimator = k3",
        "train.kl_in = loss",
        "train.reference_every = 7",
    ]
    gib = [plan(configured(train={"kl_coef": 0.1, **train})).checkpoint.gib for train in ({}, {"reference_every": 7})]
    assert 1 < gib[1] / gib[0] < 16 / 12
