"""Drawing tokens from logits with counter randomness.

Invariants: the token at a position depends on the logits, the temperature and the uniform of (stream, position) alone;
a token's logprob is that of the distribution it was drawn from.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.resources import rng


def sample(
    logits: Tensor,
    temperatures: NDArray[np.float32],
    streams: NDArray[np.uint64],
    positions: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids and logprobs, both of shape (n,), for float32 ``logits`` (n, vocabulary).

    A token is drawn by inverting the float64 distribution function over ascending ids at the uniform of its stream and
    position. Temperature 0 takes the largest logit (the first of equals); its logprob is that of temperature 1.
    """
    greedy = temperatures == 0
    if not np.all(greedy | (temperatures == 1)):
        logits = logits / torch.from_numpy(np.where(greedy, np.float32(1), temperatures))[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    drawn = torch.from_numpy(rng.uniforms(streams, positions))[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy)[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0].numpy(), logprobs.gather(1, tokens)[:, 0].numpy()
