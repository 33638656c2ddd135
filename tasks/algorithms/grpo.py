"""GRPO's loss on tokens, as pure functions of tensors.

Invariant: the loss is a sum over tokens divided by the *batch's* number of loss tokens, so the sum of micro-batches'
losses, and of their gradients, does not depend on how the batch was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """``loss``: scalar with gradient. ``clipped``: bool (n,), where the ratio lies outside the clip range and the
    gradient is cut."""

    loss: Tensor
    clipped: Tensor


def token_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, loss_tokens: int
) -> TokenLoss:
    """PPO's clipped objective on loss tokens (Schulman et al. 2017, eq. 7) with separate bounds and token-level
    averaging (Yu et al. 2025, DAPO, eq. 8–10): −Σ min(ρA, clip(ρ, 1−low, 1+high)·A) / ``loss_tokens``.

    ``logprobs`` (with gradient), ``old`` (recorded while sampling) and ``advantages`` have shape (n,), one entry a loss
    token; ``loss_tokens`` counts those of the whole batch.
    """
    ratio = torch.exp(logprobs - old)
    kept = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, kept * advantages).sum() / loss_tokens
    with torch.no_grad():
        clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return TokenLoss(loss, clipped)
