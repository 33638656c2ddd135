"""Published weights are loaded as they were, or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from libra.resources.errors import WeightError
from libra.resources.weights import load_weights, publish_weights

TENSORS = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="._"), min_size=1, max_size=12),
    hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.int64, np.int8, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    max_size=4,
)


def identical(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Same names, types, shapes and bits (NaNs included)."""
    return left.keys() == right.keys() and all(
        (left[name].dtype, left[name].shape, left[name].tobytes())
        == (right[name].dtype, right[name].shape, right[name].tobytes())
        for name in left
    )


@settings(max_examples=40, deadline=None)
@given(TENSORS)
def test_round_trip(tensors: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        weights = publish_weights(Path(name), 7, tensors, {})
        assert identical(load_weights(weights), tensors)
        assert publish_weights(Path(name), 7, {key: value.copy() for key, value in tensors.items()}, {}) == weights


@settings(max_examples=80, deadline=None)
@given(TENSORS.filter(lambda tensors: any(tensor.size for tensor in tensors.values())), st.data())
def test_a_flipped_bit_is_never_loaded(tensors: dict[str, Any], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        weights = publish_weights(Path(name), 7, tensors, {})
        path = Path(weights.path) / data.draw(st.sampled_from(["model.safetensors", "checksums.json"]))
        damaged = bytearray(path.read_bytes())
        bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            loaded = load_weights(weights)
        except WeightError:
            return
        assert identical(loaded, tensors), "only bits that mean nothing (padding, metadata) may pass"
