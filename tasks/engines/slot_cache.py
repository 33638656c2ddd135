"""A dense KV cache of slots behind Hugging Face's `Cache`, and the attention that reads it in place.

All keys and values lie in one tensor (2·layers, slots, kv_heads, max_context, head_dim). A forward takes the new tokens
of many sequences as *one flat row* (1, n): projections and MLPs see no padding, and only attention, in two calls,
treats them a sequence at a time. Invariants: rows that decode are neighbours, and so are rows that are prefilled, so
attention reads the cache through views and copies no keys; the token at position p of a slot is written to (slot, p)
and attends to positions 0 to p of its slot, whatever else lies in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedConfig

from libra.tasks.models import head_dim

ATTENTION = "libra_slots"
"""Name of the attention in ``config._attn_implementation``."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Neighbouring slots whose new tokens are attended to together.

    ``first`` and ``count`` name the slots; ``width`` is the longest context among them after this forward; ``new`` the
    most new tokens of one row. ``gather`` (count·new,) holds for every padded query its place in the flat row, and
    ``scatter`` the place of every flat token among the padded queries; both None when each row has one token. ``bias``
    (count, 1, 1, new, width) is 0 where a query may look and −inf elsewhere.
    """

    first: int
    count: int
    width: int
    new: int
    gather: Tensor | None
    scatter: Tensor | None
    bias: Tensor


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Where a flat row's tokens go: ``slots`` and ``positions`` (n,), and the ``groups`` of rows in flat order, each
    with its stretch of the flat row."""

    slots: Tensor
    positions: Tensor
    groups: tuple[tuple[slice, Rows], ...]


def plan_forward(groups: list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]) -> ForwardPlan:
    """The plan for groups of neighbouring rows: (first slot, tokens already cached a row, new tokens a row)."""
    slots, positions, planned, begin = [], [], [], 0
    for first, cached, new in groups:
        total = int(new.sum())
        slots.append(np.repeat(np.arange(first, first + len(new)), new))
        positions.append(_within(new) + np.repeat(cached, new))
        planned.append((slice(begin, begin + total), _rows(first, cached, new)))
        begin += total
    return ForwardPlan(
        torch.from_numpy(np.concatenate(slots)), torch.from_numpy(np.concatenate(positions)), tuple(planned)
    )


def _within(new: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, … within each row of a flat row."""
    ends = np.cumsum(new)
    return np.arange(int(ends[-1])) - np.repeat(ends - new, new)


def _rows(first: int, cached: NDArray[np.int64], new: NDArray[np.int64]) -> Rows:
    count, most, width = len(new), int(new.max()), int((cached + new).max())
    last = cached[:, None] + np.minimum(np.arange(most), new[:, None] - 1)
    bias = np.where(np.arange(width) <= last[:, :, None], np.float32(0), np.float32(-np.inf))
    gather = scatter = None
    if most > 1:
        begins = np.cumsum(new) - new
        gather = torch.from_numpy((begins[:, None] + np.minimum(np.arange(most), new[:, None] - 1)).reshape(-1))
        scatter = torch.from_numpy(np.repeat(np.arange(count) * most, new) + _within(new))
    return Rows(first, count, width, most, gather, scatter, torch.from_numpy(bias)[:, None, None])


class SlotCache(Cache):
    """The KV of all slots. `plan` must be set before each forward."""

    def __init__(self, config: PreTrainedConfig, slots: int, max_context: int) -> None:
        super().__init__(layers=[])
        heads, dim = config.num_key_value_heads, head_dim(config)
        self._all = torch.zeros((2 * config.num_hidden_layers, slots, heads, max_context, dim))
        self.keys = [self._all[2 * layer] for layer in range(config.num_hidden_layers)]
        self.values = [self._all[2 * layer + 1] for layer in range(config.num_hidden_layers)]
        self.plan: ForwardPlan | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values (1, kv_heads, n, head_dim) of a layer to their slots."""
        assert self.plan is not None, "a forward needs a plan"
        self.keys[layer_idx][self.plan.slots, :, self.plan.positions] = key_states[0].transpose(0, 1)
        self.values[layer_idx][self.plan.slots, :, self.plan.positions] = value_states[0].transpose(0, 1)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given to the model, so no length needs to be assumed."""
        return 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers and heads."""
        layers, _, heads, _, dim = self._all.shape
        return int(layers * heads * dim * self._all.element_size())

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""
        if length:
            one, other = self._all[:, a, :, :length], self._all[:, b, :, :length]
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    slot_cache: SlotCache,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a flat row's queries (1, heads, n, head_dim) over their slots; returns (1, n, heads, head_dim)."""
    assert slot_cache.plan is not None and isinstance(module.layer_idx, int)
    keys, values = slot_cache.keys[module.layer_idx], slot_cache.values[module.layer_idx]
    flat = query[0].transpose(0, 1)
    parts = [_attend_rows(flat[where], keys, values, rows, scaling) for where, rows in slot_cache.plan.groups]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _attend_rows(query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scaling: float) -> Tensor:
    """Queries (n, heads, head_dim) of one group; heads that share keys are folded into one matrix product."""
    heads, dim = query.shape[1:]
    shared = keys.shape[1]
    k = keys[rows.first : rows.first + rows.count, :, : rows.width]
    v = values[rows.first : rows.first + rows.count, :, : rows.width]
    padded = query if rows.gather is None else query[rows.gather]
    q = padded.view(rows.count, rows.new, shared, heads // shared, dim).permute(0, 2, 3, 1, 4)
    folded = (q * scaling).reshape(rows.count, shared, -1, dim)
    scores = (folded @ k.transpose(-1, -2)).view(rows.count, shared, heads // shared, rows.new, rows.width)
    weights = torch.softmax(scores.add_(rows.bias), dim=-1)
    mixed = weights.view(rows.count, shared, -1, rows.width) @ v
    out = mixed.view(rows.count, shared, heads // shared, rows.new, dim).permute(0, 3, 1, 2, 4)
    flat = out.reshape(rows.count * rows.new, heads, dim)
    return flat if rows.scatter is None else flat[rows.scatter]


AttentionInterface.register(ATTENTION, attend)
