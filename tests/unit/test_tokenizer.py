"""The tokenizer made for hop, and tokens that only ever extend, also with tokenizers that do not round-trip."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from libra.resources.errors import ConfigError
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.envs.hop import HopEnvironment, write_tokenizer
from libra.tasks.envs.hop_text import BUSY, END, call_text, found_text, make_tokenizer, prompt_text, return_text


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> HopEnvironment:
    """hop over a tokenizer that folds case and drops accents before it encodes: decode(encode(text)) ≠ text, and bytes
    that are no UTF-8 decode to replacement characters, so encode(decode(ids)) ≠ ids."""
    tokenizer = make_tokenizer()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    path = tmp_path_factory.mktemp("lossy") / "tokenizer.json"
    tokenizer.save(str(path))
    return HopEnvironment(EnvironmentConfig(), str(path), seed=0)


def test_a_call_costs_five_tokens() -> None:
    tokenizer = make_tokenizer()
    size = lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)  # noqa: E731
    assert size(call_text("amber-fox") + END) == 5
    assert size(prompt_text("amber-fox")) == 7
    assert size(return_text(BUSY)) == 8


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_round_trips(text: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_ids_are_the_same_everywhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tokenizer(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = Tokenizer.from_file(str(tmp_path / "a"))
    text = return_text(found_text("next", "ash-bay", "rose moss"))
    assert again.encode(text).ids == make_tokenizer().encode(text).ids


def test_a_tokenizer_without_the_protocol_is_refused(tmp_path: Path) -> None:
    from tokenizers.models import BPE

    path = tmp_path / "tokenizer.json"
    Tokenizer(BPE(vocab={"a": 0}, merges=[])).save(str(path))
    with pytest.raises(ConfigError, match=r"no token '<\|im_end\|>'"):
        HopEnvironment(EnvironmentConfig(), str(path), 0)


def test_the_lossy_tokenizer_is_lossy(lossy: HopEnvironment) -> None:
    assert lossy.render(lossy.encode("Äsh")) == "ash"
    half = make_tokenizer().encode("é").ids[:1]
    assert lossy.encode(lossy.render(np.array(half))).tolist() != half


@given(turns=st.lists(st.lists(st.integers(0, 460), min_size=0, max_size=12), min_size=1, max_size=5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_context_only_ever_extends(lossy: HopEnvironment, turns: list[list[int]], data: st.DataObject) -> None:
    """Whatever ids a policy samples, the next prompt is the last context, those very ids, and the payload."""
    task = lossy.task("train", 0)
    session = lossy.open(task, "g0m0", 0)
    context = lossy.reset(task)
    for turn, said in enumerate(turns):
        if data.draw(st.booleans(), label="a real call"):
            said = lossy.encode(call_text(task["start"])).tolist()
        sampled = np.array([*said, lossy.stop[0]], np.int32)
        action = lossy.parse(sampled, finished=True)
        before = context
        context = np.concatenate([context, sampled])
        if action.kind == "final":
            break
        payload = asyncio.run(session.tool(turn, action.call)).payload
        context = np.concatenate([context, payload])
        np.testing.assert_array_equal(context[: len(before) + len(sampled)], np.concatenate([before, sampled]))
        assert payload.dtype == np.int32 and lossy.stop[0] not in sampled[:-1]
