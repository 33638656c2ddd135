"""Models as Hugging Face defines them: building one from its config, and its tensors in and out.

Imported in engine and trainer processes only (torch, transformers). Invariants: a model's tensors are its *named
parameters*, so tied weights appear once, under the name a HF checkpoint gives them; remote code is never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from libra.resources.errors import ConfigError, WeightError

# Bars of transformers' own would tear the lines of a log.
disable_progress_bar()

ARCHITECTURES = ("qwen3", "llama")
"""``model_type`` of the configs that engines and trainers take."""
CONFIG_FILE = "config.json"


def read_config(directory: Path) -> PreTrainedConfig:
    """The model's config. `ConfigError` names the directory, what is missing in it and what would do."""
    if not directory.is_dir():
        raise ConfigError(f"the model directory {directory} does not exist; name a HF checkpoint directory")
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            f"{directory} holds no {CONFIG_FILE}; name a HF checkpoint directory (save_pretrained writes it)"
        )
    try:
        model_type = json.loads(path.read_text()).get("model_type")
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if model_type not in ARCHITECTURES:
        raise ConfigError(f"{path} has model_type {model_type!r}; one of {', '.join(ARCHITECTURES)} would do")
    return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def config_bytes(config: PreTrainedConfig) -> bytes:
    """The bytes of ``config.json``, always the same for the same config."""
    return config.to_json_string(use_diff=False).encode()


def build_model(config: PreTrainedConfig, attention: str = "sdpa") -> PreTrainedModel:
    """A float32 model with random weights (drawn from torch's generator), in evaluation mode."""
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def load_checkpoint(directory: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The float32 model of a HF checkpoint. `ConfigError` when its weights cannot be read or do not fit its config."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"the weights in {directory} cannot be loaded (safetensors are needed): {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"the weights in {directory} lack {missing[0]!r} ({len(missing)} tensors in all)")
    return model.eval()


def tensors_of(model: PreTrainedModel) -> dict[str, NDArray[Any]]:
    """The parameters by name, sharing memory with the model."""
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@torch.no_grad()
def copy_tensors(model: PreTrainedModel, tensors: Mapping[str, NDArray[Any]], source: str) -> None:
    """Copy ``tensors`` into the model's parameters. `WeightError` (nothing copied) unless names and shapes agree."""
    parameters = dict(model.named_parameters())
    if names := sorted(parameters.keys() ^ tensors.keys()):
        state = "lack" if names[0] in parameters else "have the unknown tensor"
        raise WeightError(
            f"weights at {source} {state} {names[0]!r}: they are of another model than this {CONFIG_FILE}"
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise WeightError(
                f"tensor {name!r} at {source} has shape {tensors[name].shape}, the model's {tuple(parameter.shape)}"
            )
    for name, parameter in parameters.items():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(tensors[name])))


def read_served_config(directory: Path, max_context: int, tokenizer_path: str | None) -> PreTrainedConfig:
    """The config of a model to be served. `ConfigError` when it does not know ``max_context`` positions or the
    tokenizer's tokens."""
    config = read_config(directory)
    if config.max_position_embeddings < max_context:
        raise ConfigError(
            f"engine.max_context is {max_context}, but the model at {directory} knows "
            f"{config.max_position_embeddings} positions (max_position_embeddings); lower the first"
        )
    if tokenizer_path is not None:
        check_vocabulary(config.vocab_size, tokenizer_path, Tokenizer.from_file(tokenizer_path).get_vocab_size())
    return config


def head_dim(config: PreTrainedConfig) -> int:
    """Elements of one attention head; few configs leave it out."""
    named: int | None = config.to_dict().get("head_dim")
    return named or config.hidden_size // config.num_attention_heads


def check_vocabulary(rows: int, tokenizer_path: str, tokens: int) -> None:
    """`ConfigError` when the tokenizer has more tokens than the embedding has rows."""
    if tokens > rows:
        raise ConfigError(
            f"the tokenizer {tokenizer_path} has {tokens} tokens, but the model's embedding has {rows} rows; "
            "they belong to different models: name the checkpoint's own tokenizer"
        )
