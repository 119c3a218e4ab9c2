"""What lets `mlflow.transformers` load a registered policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrl.artifacts import read_json

TOKENIZER = "components/tokenizer"  # where, below a model, MLflow looks for what `AutoTokenizer` may read
WEIGHTS = "*.safetensors"


def is_policy(folder: Path) -> bool:
    """Whether transformers alone can generate with a folder; it cannot with EAGLE-3, which reads a policy's states."""
    config = read_json(folder / "config.json")
    named = config.get("architectures") if isinstance(config, dict) else None
    is_causal = isinstance(named, list) and bool(named) and str(named[0]).endswith("ForCausalLM")
    return is_causal and (folder / "tokenizer.json").is_file()


def mlmodel(folder: Path, weights_at: Path | None) -> str:
    """The text of a policy's file `MLmodel`; `weights_at` is a policy whose weights are not beside the file."""
    from mlflow.models import Model

    config: Any = read_json(folder / "config.json")
    place = {"model_binary": "."} if weights_at is None else {"local_base_model_path": str(weights_at)}
    model = Model()
    model.add_flavor(
        "transformers",
        task="text-generation",
        instance_type="TextGenerationPipeline",
        pipeline_model_type=config["architectures"][0],
        source_model_name=str(weights_at or folder),
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
        **place,
    )
    return str(model.to_yaml())
