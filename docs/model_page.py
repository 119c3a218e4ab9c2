"""The site's page of models by feature, from the rows of `specrl/models/families.py` and the check of a `config.json`.

Nothing here imports MkDocs, so that tests read the page without it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specrl.config import ConfigError
from specrl.models.checks.config import ROPE_KINDS, check_config
from specrl.models.families import FAMILIES, UNSUPPORTED, Family
from specrl.models.layout import FP8_BLOCK
from specrl.models.shapes import KNOWN_SHAPES

CONFIGS = Path(__file__).parents[1] / "configs"
PAGE = """\
# Models by feature

Families are the rows of `specrl/models/families.py`; [Your own model family](../guides/own-family.md) adds one. What
a family cannot do is refused in one line before anything is submitted.

{families}

- *EAGLE-3*: whether vLLM returns the hidden states that [such a drafter](../features/eagle3.md) reads.
- *MTP*: whether the family has [multi-token-prediction layers](../features/mtp.md), which draft and are trained.
- *FP8*: the linear layers that can be in [FP8](../features/fp8.md).
- *parallel*: what the trainer can divide among ranks: tensors (TP), layers (PP) and experts (EP). The remaining factor
  of the ranks is data parallelism. The engine divides tensors.
- *windows*: whether the policy's attention may have sliding windows.
- *tied*: whether the output layer may share the embedding matrix.
- *rotary scaling*: the kinds that trainer and engine compute alike.

All families draft from [text](../features/text-drafts.md), restart exactly, and are exported as Hugging Face folders.

## Models that can be planned before they are downloaded

A model in a folder is planned from its `config.json`. These are planned from a table:

{models}

Training in native FP8 needs heads of a multiple of {block} channels.

## Families that cannot be trained

vLLM drafts with the multi-token-prediction layers of these families too, but specrl refuses their models, and says what
the trainer lacks.

{unsupported}
"""


def models() -> str:
    """Write tables of the families, of the models whose shapes are known, and of what is not supported."""
    families = ["family", "architecture", "EAGLE-3", "MTP", "FP8", "parallel", "experts", "windows", "tied"]
    known = ["model", "family", "parameters", "experts", "native FP8 training", "configurations"]
    return PAGE.format(
        families=table([*families, "rotary scaling"], map(features, FAMILIES.values())),
        models=table(known, (sizes(name) for name in KNOWN_SHAPES)),
        block=FP8_BLOCK,
        unsupported=table(["architecture", "why"], ((f"`{name}`", why) for name, why in UNSUPPORTED.items())),
    )


def features(family: Family) -> list[str]:
    """List what a family can do, as the cells of its row."""
    small = smallest(family)
    assert computes(small), family.name
    windows = {"sliding_window": 512, "layer_types": ["sliding_attention"] * small["num_hidden_layers"]}
    kinds = [kind for kind in ROPE_KINDS if kind != "default" and computes(small | {"rope_scaling": scaling(kind)})]
    return [
        f"`{family.name}`",
        f"`{family.architecture}`",
        yes(family.eagle3),
        yes(family.mtp is not None),
        ", ".join(f"`{name}`" for name in family.layer_names),
        "TP, PP, EP" if family.router else "TP, PP",
        "in every layer" if family.router else "none",
        yes(computes(small | windows)),
        yes(computes(small | {"tie_word_embeddings": True})),
        ", ".join(kinds) or "none",
    ]


def smallest(family: Family) -> dict[str, Any]:
    """Make the `config.json` of a model of the family, as plain as it can be."""
    layers = 8
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers, "vocab_size": 1024},
        **{"max_position_embeddings": 2048, "tie_word_embeddings": False},
        **heads,
        **(experts if family.router else {}),
        **({family.experts_from: layers} if family.experts_from else {}),
        **{key: [entry] * layers for key, entry in family.every_layer},
    }


def scaling(kind: str) -> dict[str, Any]:
    """Make a table of rotary embeddings of a kind, with the keys that any kind needs."""
    return {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def computes(config: dict[str, Any]) -> bool:
    """Whether trainer and engine compute what a `config.json` asks for."""
    try:
        check_config(config)
    except ConfigError:
        return False
    return True


def sizes(name: str) -> list[str]:
    """List the sizes of a model whose shape is known, as the cells of its row."""
    shape = KNOWN_SHAPES[name]
    paths = sorted(CONFIGS.glob("*.toml"))
    used = [f"`{path.name}`" for path in paths if tomllib.loads(path.read_text())["model"]["source"] == name]
    whole = shape.head_dim % FP8_BLOCK == 0
    experts = str(shape.num_experts) if shape.num_experts else "none"
    return [f"`{name}`", shape.family.name, f"{shape.parameters / 1e9:.2f} G", experts, yes(whole), ", ".join(used)]


def yes(value: bool) -> str:
    return "yes" if value else "no"


def table(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
