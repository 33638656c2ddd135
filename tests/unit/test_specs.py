"""Specs: shipped ones against what their models' makers state, any HF config, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra.resources.errors import ConfigError
from libra.resources.specs import load_cluster, load_hardware, load_model
from libra.resources.specs.files import shipped

# Total (and active) parameters as the models' cards state them.
STATED = {
    "Qwen3-0.6B": (0.596e9, None),
    "Qwen3-1.7B": (1.72e9, None),
    "Qwen3-4B": (4.02e9, None),
    "Qwen3-8B": (8.19e9, None),
    "Qwen3-14B": (14.77e9, None),
    "Qwen3-32B": (32.76e9, None),
    "Qwen3-30B-A3B": (30.53e9, 3.35e9),
    "SmolLM2-135M": (134.5e6, None),
    "quickstart": (454.4e3, None),
}


@pytest.mark.parametrize("name", STATED)
def test_parameters_follow_from_the_architecture(name: str) -> None:
    model = load_model(name)
    total, active = STATED[name]
    assert model.parameters == pytest.approx(total, rel=0.005)
    if active:
        assert model.active_parameters == pytest.approx(active, rel=0.1)
        assert model.active_parameters < model.parameters
    else:
        assert model.active_parameters <= model.parameters


def test_kv_counts_kv_heads_of_true_size() -> None:
    assert load_model("Qwen3-14B").kv_bytes_per_token == 163_840
    assert load_model("Qwen3-32B").kv_bytes_per_token == 262_144
    assert load_model("Qwen3-4B").head_dim == 128  # not 2560 / 32
    assert load_model("Qwen3-30B-A3B").head_dim == 128  # not 2048 / 32


def test_a_decode_step_of_a_mixture_reads_more_weights_in_larger_batches() -> None:
    moe, dense = load_model("Qwen3-30B-A3B"), load_model("Qwen3-14B")
    assert moe.decode_weight_bytes(1) < 0.2 * moe.weight_bytes
    assert moe.decode_weight_bytes(1) < moe.decode_weight_bytes(64) <= moe.weight_bytes
    assert dense.decode_weight_bytes(1) == dense.decode_weight_bytes(64)


@pytest.mark.parametrize("name", shipped("hardware"))
def test_shipped_hardware_is_valid_and_says_its_source(name: str) -> None:
    spec = load_hardware(name)
    assert spec.name == name
    assert spec.hbm < spec.hbm_gb_per_s * 1e9


def test_network_is_in_bits() -> None:
    spec = load_hardware("a800_80g")
    assert spec.network == pytest.approx(25e9 * spec.efficiency.network)


def test_every_shipped_cluster_loads() -> None:
    assert [load_cluster(name).name for name in shipped("cluster")] == shipped("cluster")


def test_any_hf_config(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "max_position_embeddings": 40960,
    }  # fmt: skip
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder)
    assert model.name == "mine"
    assert model.parameters == load_model("Qwen3-4B").parameters
    assert model.max_context == 40960


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not described"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_key_value_heads": 5}, "no multiple of kv_heads"),
    ],
)
def test_a_wrong_hf_config_says_what_is_wrong(tmp_path: Path, change: dict[str, object], says: str) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=says):
        load_model(tmp_path)


def test_an_unknown_name_suggests_one() -> None:
    with pytest.raises(ConfigError, match="did you mean h100"):
        load_hardware("h1000")
    with pytest.raises(ConfigError, match="no model spec 'Qwen9'"):
        load_model("Qwen9")
