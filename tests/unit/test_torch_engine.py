"""The torch engine against transformers' own forward, teacher-forced on the engine's tokens."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import ARCHITECTURES, publish, tiny_model
from transformers import PreTrainedModel

from libra.resources.errors import ConfigError, WeightError
from libra.resources.types import Tokens, WeightVersion
from libra.resources.weights import publish_weights
from libra.tasks.engines.base import EngineConfig, Generated, GenerateRequest
from libra.tasks.engines.sampling import sample
from libra.tasks.engines.torch import TorchEngine
from libra.tasks.envs.hop import write_tokenizer
from libra.tasks.models import CONFIG_FILE

pytestmark = pytest.mark.torch

STOP = (3,)
GAP = 1e-4


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture
def weights(model: PreTrainedModel, tmp_path: Path) -> WeightVersion:
    return publish(model, tmp_path / "weights", 0)


def engine(weights: WeightVersion, deterministic: bool = False, **settings: Any) -> TorchEngine:
    made = TorchEngine(
        EngineConfig(**({"slots": 4, "max_context": 128, "max_prefill_tokens": 64} | settings)),
        tokenizer_path=None,
        deterministic=deterministic,
    )
    made.load(weights)
    return made


def context(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(4, 50, length).astype(np.int32)


def request(name: str, tokens: Tokens, max_new: int = 12, **changes: Any) -> GenerateRequest:
    fields = {"sequence": name, "stop": STOP, "temperature": 1.0, "stream": zlib.crc32(name.encode())} | changes
    return GenerateRequest(id=name, tokens=tokens, max_new=max_new, **fields)


def run(made: TorchEngine) -> dict[str, Generated]:
    """Step until nothing is left to do."""
    done: dict[str, Generated] = {}
    while made.busy:
        for end in made.step():
            assert end.id not in done, "a request ends exactly once"
            done[end.id] = end
    return done


@torch.no_grad()
def reference_logits(model: PreTrainedModel, before: Tokens, said: Tokens) -> torch.Tensor:
    """transformers' logits from which each token of ``said`` is chosen, the reference's tokens teacher-forced."""
    ids = torch.from_numpy(np.concatenate([before, said]).astype(np.int64))[None]
    return model(input_ids=ids[:, :-1]).logits[0, len(before) - 1 :]


def check(model: PreTrainedModel, before: Tokens, end: Generated, greedy: bool = False, temperature: float = 1) -> None:
    logits = reference_logits(model, before, end.tokens)
    logprobs = torch.log_softmax(logits / temperature, -1)
    expected = logprobs[torch.arange(len(end.tokens)), torch.from_numpy(end.tokens.astype(np.int64))]
    assert np.abs(expected.numpy() - end.logprobs).max() <= 1e-4
    if greedy:
        top = logits.topk(2, dim=-1)
        clear = (top.values[:, 0] - top.values[:, 1] > GAP).numpy()
        assert clear.sum() > len(clear) // 2
        np.testing.assert_array_equal(top.indices[:, 0].numpy()[clear], end.tokens[clear])


@pytest.mark.parametrize("greedy", [True, False])
def test_agrees_with_transformers_under_continuous_batching(
    model: PreTrainedModel, weights: WeightVersion, greedy: bool
) -> None:
    made = engine(weights)
    contexts = {f"s{n}": context(1 + 7 * n, n) for n in range(10)}
    for name, tokens in contexts.items():
        made.submit(request(name, tokens, temperature=0.0 if greedy else 1.0))
    done = run(made)
    assert done.keys() == contexts.keys() and made.stats().prefilled == sum(map(len, contexts.values()))
    for name, end in done.items():
        check(model, contexts[name], end, greedy)
        assert end.finish == ("stop" if end.tokens[-1] in STOP else "length") and set(end.versions) == {0}


def test_a_prompt_longer_than_a_step_is_prefilled_in_parts(model: PreTrainedModel, weights: WeightVersion) -> None:
    made = engine(weights, max_prefill_tokens=16)
    contexts = {"long": context(70), "short": context(5, 1), "longer": context(90, 2)}
    for name, tokens in contexts.items():
        made.submit(request(name, tokens))
    for name, end in run(made).items():
        check(model, contexts[name], end)


def test_temperature_shapes_the_distribution_that_is_reported(model: PreTrainedModel, weights: WeightVersion) -> None:
    made = engine(weights)
    made.submit(request("warm", context(9), temperature=1.7))
    made.submit(request("cool", context(9), temperature=0.4))
    made.submit(request("greedy", context(9), temperature=0.0))
    done = run(made)
    check(model, context(9), done["warm"], temperature=1.7)
    check(model, context(9), done["cool"], temperature=0.4)
    check(model, context(9), done["greedy"], greedy=True)


def test_a_turn_reuses_the_kv_of_the_turns_before(model: PreTrainedModel, weights: WeightVersion) -> None:
    made = engine(weights)
    tokens = context(20)
    made.submit(request("t0", tokens, sequence="s", stop=()))
    first = run(made)["t0"]
    longer = np.concatenate([tokens, first.tokens, context(6, 9)])
    made.submit(request("t1", longer, sequence="s"))
    second = run(made)["t1"]
    # The last sampled token was never fed to the model, so its KV is the one that is missing.
    assert (first.cached, second.cached) == (0, len(tokens) + len(first.tokens) - 1)
    assert made.stats().prefilled == len(longer) - len(first.tokens) + 1
    check(model, longer, second)


def test_only_the_common_prefix_is_reused(model: PreTrainedModel, weights: WeightVersion) -> None:
    made = engine(weights)
    tokens = context(20)
    made.submit(request("t0", tokens, sequence="s"))
    run(made)
    changed = tokens.copy()
    changed[11] += 1 if changed[11] < 49 else -1
    made.submit(request("t1", changed, sequence="s"))
    made.submit(request("same", changed, sequence="other"))
    done = run(made)
    assert (done["t1"].cached, done["same"].cached) == (11, 0)
    check(model, changed, done["t1"])


def test_an_equal_context_is_reused_but_for_its_last_token(model: PreTrainedModel, weights: WeightVersion) -> None:
    made = engine(weights)
    for turn in ("a", "b"):
        made.submit(request(turn, context(20), sequence="s", stream=7))
    done = run(made)
    assert (done["a"].cached, done["b"].cached) == (0, 19)
    np.testing.assert_array_equal(done["a"].tokens, done["b"].tokens)
    check(model, context(20), done["b"])


def test_idle_sequences_are_evicted_oldest_first_and_running_ones_never(
    model: PreTrainedModel, weights: WeightVersion
) -> None:
    made = engine(weights, slots=3)
    turns = {f"s{n}": context(15 + n, n) for n in range(3)}
    for name, tokens in turns.items():
        made.submit(request(name, tokens, stop=()))
        turns[name] = np.concatenate([tokens, run(made)[name].tokens, context(3, 5)])
    made.submit(request("new", context(10), max_new=40, stop=()))
    made.step()  # takes the slot of s0, which was used longest ago
    for name, tokens in turns.items():
        made.submit(request(f"{name}b", tokens, sequence=name))
    done = run(made)
    assert done["s1b"].cached > 0 and done["s2b"].cached > 0 and done["s0b"].cached == 0
    for name, tokens in turns.items():
        check(model, tokens, done[f"{name}b"])
    check(model, context(10), done["new"])


def test_abort_frees_the_slot_and_disturbs_nobody(model: PreTrainedModel, weights: WeightVersion) -> None:
    made = engine(weights, slots=2)
    for name in ("a", "b", "waiting", "c"):
        made.submit(request(name, context(12, ord(name[0])), stop=()))
    for _ in range(4):
        assert not made.step()
    made.abort("a")
    made.abort("waiting")
    made.abort("unknown")
    stats = made.stats()
    assert (stats.running, stats.waiting, stats.resident_sequences) == (1, 1, 1)
    done = run(made)
    assert [done[name].finish for name in ("a", "waiting", "b", "c")] == ["abort", "abort", "length", "length"]
    assert (len(done["a"].tokens), len(done["waiting"].tokens)) == (4, 0)
    for name in ("a", "b", "c"):
        check(model, context(12, ord(name[0])), done[name])
    for name in ("b", "c"):
        made.release(name)
    assert made.stats().resident_tokens == made.stats().resident_sequences == 0 and not made.busy


def test_a_sequence_released_while_running_leaves_when_it_ends(weights: WeightVersion) -> None:
    made = engine(weights)
    made.submit(request("a", context(12)))
    made.step()
    made.release("a")
    assert made.stats().running == 1
    run(made)
    assert made.stats().resident_sequences == 0


def test_weights_swapped_in_the_middle_of_a_request(
    model: PreTrainedModel, weights: WeightVersion, tmp_path: Path
) -> None:
    made = engine(weights)
    newer = tiny_model(model.config.model_type, seed=1)
    contexts = {f"s{n}": context(10 + 8 * n, n) for n in range(4)}
    for name, tokens in contexts.items():
        made.submit(request(name, tokens, stop=()))
    for _ in range(5):
        made.step()
    made.load(publish(newer, tmp_path / "weights", 1))
    made.load(publish(newer, tmp_path / "weights", 1))
    assert made.version == 1 and made.stats().resident_tokens == 0
    for name, end in run(made).items():
        old = int((end.versions == 0).sum())
        np.testing.assert_array_equal(end.versions, [0] * old + [1] * (12 - old))
        assert 0 < old < 12
        before = np.concatenate([contexts[name], end.tokens[:old]])
        check(model, contexts[name], _part(end, slice(0, old)))
        check(newer, before, _part(end, slice(old, None)))


def _part(end: Generated, part: slice) -> Generated:
    return replace(end, tokens=end.tokens[part], logprobs=end.logprobs[part], versions=end.versions[part])


def test_damaged_weights_are_refused_and_the_old_ones_stay(
    model: PreTrainedModel, weights: WeightVersion, tmp_path: Path
) -> None:
    made = engine(weights)
    bad = publish(tiny_model(model.config.model_type, seed=1), tmp_path / "weights", 1)
    path = Path(bad.path) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightError, match="damaged"):
        made.load(bad)
    assert made.version == 0
    made.submit(request("a", context(9)))
    check(model, context(9), run(made)["a"])


def test_weights_of_another_model_are_refused(weights: WeightVersion, tmp_path: Path) -> None:
    made = engine(weights)
    tensors = {"model.embed_tokens.weight": np.zeros((50, 32), np.float32)}
    other = publish_weights(tmp_path / "weights", 1, tensors, {CONFIG_FILE: b"{}"})
    with pytest.raises(WeightError, match="lack"):
        made.load(other)
    assert made.version == 0


def sampled_alone_and_together(weights: WeightVersion, deterministic: bool) -> list[tuple[Generated, Generated]]:
    """The same requests, each in an engine of its own and all in one, in another order and with fewer slots."""
    requests = [request(f"s{n}", context(5 + 6 * n, n), max_new=16, stream=n) for n in range(8)]
    alone = []
    for one in requests:
        single = engine(weights, deterministic)
        single.submit(one)
        alone.append(run(single)[one.id])
    crowd = engine(weights, deterministic, slots=3)
    for one in reversed(requests):
        crowd.submit(one)
    together = run(crowd)
    return [(end, together[end.id]) for end in alone]


def test_a_request_samples_the_same_tokens_whatever_runs_beside_it(weights: WeightVersion) -> None:
    for alone, together in sampled_alone_and_together(weights, deterministic=False):
        np.testing.assert_array_equal(alone.tokens, together.tokens)
        np.testing.assert_allclose(alone.logprobs, together.logprobs, atol=1e-4)


def test_in_a_deterministic_run_every_bit_is_the_same(weights: WeightVersion) -> None:
    for alone, together in sampled_alone_and_together(weights, deterministic=True):
        np.testing.assert_array_equal(alone.tokens, together.tokens)
        np.testing.assert_array_equal(alone.logprobs, together.logprobs)


def test_the_context_limit_ends_a_request(weights: WeightVersion) -> None:
    made = engine(weights, max_context=32)
    made.submit(request("a", context(28), stop=()))
    end = run(made)["a"]
    assert (end.finish, len(end.tokens)) == ("length", 4)


def test_a_second_request_of_a_running_sequence_waits_for_the_first(weights: WeightVersion) -> None:
    made = engine(weights)
    made.submit(request("a", context(12), sequence="s"))
    made.submit(request("b", context(12), sequence="s"))
    made.submit(request("other", context(12)))
    made.step()
    assert (made.stats().running, made.stats().waiting) == (2, 1)
    assert run(made).keys() >= {"b"}


def test_bad_requests_are_refused(weights: WeightVersion) -> None:
    made = engine(weights)
    with pytest.raises(ValueError, match="128 tokens of context"):
        made.submit(request("a", context(128)))
    made.submit(request("a", context(8)))
    with pytest.raises(ValueError, match="an id names one request"):
        made.submit(request("a", context(8)))
    for strange in (-1, 50):
        with pytest.raises(ValueError, match=f"holds token id {strange}, but the model's vocabulary has 50"):
            made.submit(request("b", np.array([3, strange], np.int32)))
    bare = TorchEngine(EngineConfig(), tokenizer_path=None, deterministic=False)
    with pytest.raises(WeightError, match="load a version first"):
        bare.submit(request("a", context(8)))


def test_a_tokenizer_of_another_model_is_refused(weights: WeightVersion, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path)
    made = TorchEngine(EngineConfig(max_context=128), tokenizer_path=str(path), deterministic=False)
    with pytest.raises(ConfigError, match="embedding has 50 rows"):
        made.load(weights)
    assert made.version == -1


def test_a_context_beyond_the_models_positions_is_refused(weights: WeightVersion) -> None:
    with pytest.raises(ConfigError, match="knows 256 positions"):
        engine(weights, max_context=512)


def test_samples_follow_the_distribution() -> None:
    count = 20_000
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -30.0]])
    streams: NDArray[np.uint64] = np.arange(count).astype(np.uint64) * np.uint64(7919)
    tokens, logprobs = sample(
        logits.expand(count, -1), np.ones(count, np.float32), streams, np.full(count, 5, np.int64)
    )
    p = logits.softmax(-1)[0].numpy()
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / count, p, atol=0.01)
    np.testing.assert_allclose(logprobs, np.log(p)[tokens], rtol=1e-5)
