"""What a run with vLLM engines may not ask for is refused before anything starts, by the key that asks."""

from __future__ import annotations

import pytest

from libra.pipeline.config import load_config
from libra.resources.errors import ConfigError
from libra.scheduler_plugin.cmlfq.policy import CMlfq
from libra.scheduler_plugin.policy import load_policy
from libra.tasks.engines.base import EngineConfig, parse_options
from libra.tasks.engines.vllm_options import VllmOptions, vllm_problems


def test_the_shipped_config_is_sound() -> None:
    config = load_config("vllm_cpu")
    assert [bucket.tp for bucket in config.buckets] == [1, 2]
    assert config.engine.kind == "vllm"
    assert isinstance(load_policy(config.policy.options()), CMlfq)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.options.top_p=0.9", r"engine\.options\.top_p = 0\.9 cuts tokens out of the distribution"),
        ("engine.options.top_k=5", r"engine\.options\.top_k = 5 cuts"),
        ("engine.options.min_p=0.1", r"engine\.options\.min_p = 0\.1 cuts"),
        (
            "engine.options.repetition_penalty=1.2",
            r"engine\.options\.repetition_penalty = 1\.2 shifts the distribution",
        ),
        ("engine.options.logprobs_mode=raw_logprobs", r"logprobs_mode = 'raw_logprobs' is decided by nothing"),
        ("engine.options.temperature=0.7", r"temperature = 0\.7 is decided by algorithm\.temperature"),
        ("engine.options.tensor_parallel_size=2", r"is decided by buckets\.\*\.tp"),
        ("engine.options.dtype=int8", r"dtype"),
        ("engine.options.blocksize=32", r"blocksize"),
        ("algorithm.temperature=0.005", r"algorithm\.temperature = 0\.005 .* no temperature between 0 and 0\.01"),
        ("eval.temperature=0.005", r"eval\.temperature = 0\.005"),
        ("deterministic=true", r"deterministic = true but engine\.kind = 'vllm'"),
        ("trainer.options.cold_start.head_dim=16", r"head_dim 16, which vLLM's attention on CPUs does not know"),
    ],
)
def test_what_would_make_logprobs_wrong_or_cannot_run_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config("vllm_cpu", [override])


def test_other_engines_may_have_options_of_these_names() -> None:
    assert load_config("quickstart", ["engine.options.top_p=0.9"]).engine.options == {"top_p": 0.9}


def test_sound_options_raise_nothing() -> None:
    config = EngineConfig(kind="vllm", options={"kv_cache": "64 MiB", "dtype": "bfloat16"})
    assert parse_options(VllmOptions, config).kv_cache == 64 * 2**20
    assert vllm_problems(config, deterministic=False, temperatures={"t": 1.0, "e": 0.0}, head_dim=32) == []
