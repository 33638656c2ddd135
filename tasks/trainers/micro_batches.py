"""Rows of very different lengths as padded micro-batches, and the model's logprobs of their loss tokens.

Invariants: padding is on the right, where causal attention cannot see it; the split into micro-batches changes no sum
over tokens (but for rounding); equal inputs give equal splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from libra.resources.types import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training sequence: ``tokens`` and ``mask`` of shape (n,); the first token is never a loss token."""

    tokens: Tokens
    mask: NDArray[np.int8]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """``rows``: places in the batch; ``ids`` (rows, width): right-padded; ``where`` (rows, width − 1): whether the
    *next* token is a loss token. Loss tokens are flattened row by row, in that order everywhere."""

    rows: tuple[int, ...]
    ids: Tensor
    where: Tensor

    def targets(self) -> Tensor:
        """The loss tokens' ids, flat."""
        return self.ids[:, 1:][self.where]


def cut(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
    """Places of the rows of each micro-batch: rows sorted by length, at most ``max_tokens`` padded tokens together; a
    longer row stands alone."""
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if current and (len(current) + 1) * lengths[place] > max_tokens:
            batches.append(tuple(current))
            current = []
        current.append(place)
    return [*batches, tuple(current)] if current else batches


def micro_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[MicroBatch]:
    """The rows as padded micro-batches."""
    for places in cut([len(row.tokens) for row in rows], max_tokens):
        width = max(len(rows[place].tokens) for place in places)
        ids = np.zeros((len(places), width), np.int64)
        mask = np.zeros((len(places), width), np.bool_)
        for line, place in enumerate(places):
            n = len(rows[place].tokens)
            ids[line, :n], mask[line, :n] = rows[place].tokens, rows[place].mask
        yield MicroBatch(places, torch.from_numpy(ids), torch.from_numpy(mask[:, 1:]))


def loss_logits(model: PreTrainedModel, batch: MicroBatch, temperature: float = 1.0) -> Tensor:
    """Logits / ``temperature`` (m, vocabulary) from which the micro-batch's m loss tokens were drawn; the head is
    applied at those places only."""
    hidden = model.base_model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    logits: Tensor = model.get_output_embeddings()(hidden[batch.where])
    return logits if temperature == 1 else logits / temperature
