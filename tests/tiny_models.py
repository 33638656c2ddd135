"""Tiny random models of the architectures that engines and trainers take, published as a run publishes weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from libra.resources.types import WeightVersion
from libra.resources.weights import publish_weights
from libra.tasks.models import CONFIG_FILE, build_model, config_bytes, tensors_of

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
ARCHITECTURES = ("qwen3", "llama")


def tiny_config(architecture: str, vocabulary: int = 50, **sizes: Any) -> PreTrainedConfig:
    """Qwen3 with tied embeddings, or Llama with untied ones. ``sizes`` where they shall differ from `SIZES`."""
    if architecture == "qwen3":
        return Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=True, **SIZES | sizes)
    return LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=False, **SIZES | sizes)


def tiny_model(architecture: str, seed: int = 0, vocabulary: int = 50, **sizes: Any) -> PreTrainedModel:
    """A model whose weights depend on ``seed``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_model(tiny_config(architecture, vocabulary, **sizes))


def publish(model: PreTrainedModel, directory: Path, version: int) -> WeightVersion:
    """Publish the model as a trainer does."""
    return publish_weights(directory, version, tensors_of(model), {CONFIG_FILE: config_bytes(model.config)})
