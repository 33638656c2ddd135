"""The supervised loss of the cold start: negative log-likelihood, summed over tokens and divided once."""

from __future__ import annotations

from torch import Tensor


def token_loss(logprobs: Tensor, *, loss_tokens: int) -> Tensor:
    """−Σ ``logprobs`` / ``loss_tokens``; ``logprobs`` (n,) are those of this micro-batch's loss tokens, ``loss_tokens``
    counts those of the whole batch."""
    return -logprobs.sum() / loss_tokens
