"""Real vLLM samples what the trainer believes it samples, under the weights that it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import publish, tiny_model
from vllm_parts import MAX_CONTEXT, PREFILL, SIZES, SLOTS, VLLM, VOCAB, publish_model, vllm_model

from libra.resources.errors import ConfigError, WeightError
from libra.tasks.engines.base import EngineConfig, Generated, GenerateRequest
from libra.tasks.registry import engine_class

pytestmark = VLLM
CLOSE = 2e-4
"""Between float32 logprobs of two implementations."""


@pytest.fixture
def engine(vllm_core: Any, tmp_path: Path) -> Iterator[Any]:
    config = EngineConfig(kind="vllm", slots=SLOTS, max_context=MAX_CONTEXT)
    made = engine_class("vllm")(config, tokenizer_path=None, deterministic=False)
    made.load(publish_model(tmp_path, 0))
    yield made


def prompt(length: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def request(
    name: str, tokens: NDArray[np.int32], max_new: int = 40, temperature: float = 1.0, stream: int = 7
) -> GenerateRequest:
    return GenerateRequest(name, name.split("/")[0], tokens, max_new, (), temperature, stream)


def run(engine: Any, *requests: GenerateRequest) -> dict[str, Generated]:
    for one in requests:
        engine.submit(one)
    ended: dict[str, Generated] = {}
    while engine.busy:
        ended |= {one.id: one for one in engine.step()}
    return ended


def logprobs(version: int, context: NDArray[np.int32], tokens: NDArray[np.int32], temperature: float) -> Any:
    """The trainer's: of the whole distribution of the model of this version, at the temperature."""
    import torch

    ids = torch.from_numpy(np.concatenate([context, tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = vllm_model(version)(input_ids=ids).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits / (temperature or 1.0), -1).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_logprobs_are_the_trainers(engine: Any, temperature: float) -> None:
    # Beside a request of another temperature: vLLM treats batches of one kind on a way of their own.
    context = prompt(45)
    ended = run(engine, request("a", context, temperature=temperature), request("b", context, temperature=0.9))["a"]
    expected = logprobs(0, context, ended.tokens, temperature)
    np.testing.assert_allclose(ended.logprobs, expected[np.arange(40), ended.tokens], atol=CLOSE)
    if temperature == 0:
        best = np.sort(expected, axis=-1)
        clear = best[:, -1] - best[:, -2] > CLOSE
        assert clear.sum() > 30
        np.testing.assert_array_equal(ended.tokens[clear], expected.argmax(-1)[clear])


def test_samples_follow_the_distribution(engine: Any) -> None:
    """The first token over 600 streams, against its probabilities: chi-squared, far from the 1e-6 quantile."""
    context = prompt(20)
    ended = run(engine, *[request(f"s{n}", context, max_new=1, stream=n) for n in range(600)])
    expected = np.exp(logprobs(0, context, np.zeros(1, np.int32), 1.0)[0]) * 600
    seen = np.bincount([int(one.tokens[0]) for one in ended.values()], minlength=VOCAB)
    common = expected > 5
    chi = (((seen - expected) ** 2)[common] / expected[common]).sum()
    assert chi < common.sum() + 6 * np.sqrt(2 * common.sum())


def test_a_request_is_drawn_again_the_same_and_another_stream_otherwise(engine: Any) -> None:
    context = prompt(30)
    first = run(engine, request("a", context), request("b", context, stream=8))
    again = run(engine, request("c", context))
    assert again["c"].tokens.tolist() == first["a"].tokens.tolist()
    assert first["b"].tokens.tolist() != first["a"].tokens.tolist()


def test_what_is_drawn_does_not_depend_on_the_parts_in_which_a_prompt_is_computed(engine: Any) -> None:
    """Alone it is computed in parts of `PREFILL` tokens, beside others in smaller ones."""
    context = prompt(3 * PREFILL + 5, seed=3)
    alone = run(engine, request("a", context))["a"]
    others = [request(f"o{number}", prompt(PREFILL + 9, seed=4 + number), stream=number) for number in range(SLOTS - 1)]
    beside = run(engine, *others, request("b", prompt(7, seed=9)), request("c", context))["c"]
    assert beside.tokens.tolist() == alone.tokens.tolist()
    expected = logprobs(0, context, alone.tokens, 1.0)
    np.testing.assert_allclose(alone.logprobs, expected[np.arange(len(alone.tokens)), alone.tokens], atol=CLOSE)


def test_new_weights_replace_the_old_ones_and_all_their_kv(engine: Any, tmp_path: Path) -> None:
    context, other = prompt(100), prompt(100, seed=1)
    run(engine, request("before/0", other, max_new=30))
    engine.submit(request("during", context, max_new=100))
    while not engine.stats().sampled > 40:
        assert engine.step() == []
    engine.load(publish_model(tmp_path, 1))
    ended = run(engine, request("before/1", other, max_new=30))
    during, after = ended["during"], ended["before/1"]
    assert after.cached == 0
    assert set(after.versions.tolist()) == {1}
    expected = logprobs(1, other, after.tokens, 1.0)
    np.testing.assert_allclose(after.logprobs, expected[np.arange(30), after.tokens], atol=CLOSE)
    changed = int((during.versions == 0).sum())
    assert 0 < changed < 100
    assert (np.diff(during.versions) >= 0).all()
    for version, part in ((0, slice(0, changed)), (1, slice(changed, 100))):
        expected = logprobs(version, context, during.tokens, 1.0)[np.arange(100), during.tokens]
        np.testing.assert_allclose(during.logprobs[part], expected[part], atol=CLOSE)


def test_what_is_wrong_with_one_request_ends_that_one(engine: Any) -> None:
    wrong = prompt(10)
    wrong[3] = VOCAB
    with pytest.raises(ValueError, match=f"token id {VOCAB}, .* vocabulary has {VOCAB}"):
        engine.submit(request("wrong", wrong))
    with pytest.raises(ValueError, match=r"no temperature between 0 and 0\.01"):
        engine.submit(request("cold", prompt(10), temperature=0.001))
    ended = run(engine, request("wrong", prompt(10), temperature=-1.0), request("right", prompt(10)))
    assert ended["wrong"].finish == "abort"
    assert "temperature must be non-negative" in str(ended["wrong"].error)
    assert ended["right"].error is None


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(engine: Any, tmp_path: Path) -> None:
    other = publish(tiny_model("qwen3", vocabulary=VOCAB + 1, **SIZES), tmp_path, 1)
    with pytest.raises(WeightError, match=r"of another model .*'model\.embed_tokens\.weight' is .*41.*40"):
        engine.load(other)
    assert run(engine, request("a", prompt(10)))["a"].versions.tolist() == [0] * 40


def test_a_request_without_weights_or_twice_is_refused(engine: Any) -> None:
    engine.submit(request("a", prompt(5)))
    with pytest.raises(ValueError, match="an id names one request"):
        engine.submit(request("a", prompt(5)))
    engine.abort("a")
    config = EngineConfig(kind="vllm", slots=SLOTS, max_context=MAX_CONTEXT)
    bare = engine_class("vllm")(config, tokenizer_path=None, deterministic=False)
    with pytest.raises(WeightError, match="load a version first"):
        bare.submit(request("b", prompt(5)))
    with pytest.raises(ConfigError, match="deterministic = true"):
        engine_class("vllm")(config, tokenizer_path=None, deterministic=True)
