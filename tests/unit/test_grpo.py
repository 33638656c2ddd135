"""Advantages and losses against references of a few lines, and the config that holds them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from libra.tasks.algorithms import supervised
from libra.tasks.algorithms.base import AlgorithmConfig, group_advantages, has_spread
from libra.tasks.algorithms.grpo import token_loss

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def reference_advantages(rewards: list[float]) -> list[float]:
    n = len(rewards)
    mean = sum(rewards) / n
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / n)
    return [(r - mean) / (std + 1e-6) for r in rewards]


def reference_loss(new: list[float], old: list[float], adv: list[float], low: float, high: float, tokens: int) -> float:
    total = 0.0
    for n, o, a in zip(new, old, adv, strict=True):
        ratio = math.exp(n - o)
        clipped = min(max(ratio, 1 - low), 1 + high)
        total += min(ratio * a, clipped * a)
    return -total / tokens


@given(REWARDS)
def test_advantages_equal_the_reference(rewards: list[float]) -> None:
    np.testing.assert_allclose(group_advantages(rewards), reference_advantages(rewards), rtol=1e-6, atol=1e-6)


def test_zero_one_rewards_give_unit_advantages() -> None:
    np.testing.assert_allclose(group_advantages([1, 0, 0, 1]), [1, -1, -1, 1], rtol=1e-5)


def test_a_missing_member_is_not_a_zero() -> None:
    np.testing.assert_allclose(group_advantages([1.0, 0.0, 0.0]), np.array([2, -1, -1]) / math.sqrt(2), rtol=1e-5)


def test_a_group_without_spread_has_no_advantage() -> None:
    assert not has_spread([1.0, 1.0]) and has_spread([1.0, 0.0])
    assert np.all(group_advantages([1.0, 1.0, 1.0]) == 0)


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(count, generator=source)
    new = old + 0.4 * torch.randn(count, generator=source)
    return new.requires_grad_(), old, torch.randn(count, generator=source)


def test_the_loss_equals_the_reference() -> None:
    new, old, adv = tokens(200)
    found = token_loss(new, old, adv, clip_low=0.2, clip_high=0.28, loss_tokens=350)
    expected = reference_loss(new.tolist(), old.tolist(), adv.tolist(), 0.2, 0.28, 350)
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_clipped_token_has_no_gradient_and_others_have_it() -> None:
    new, old, adv = tokens(500)
    found = token_loss(new, old, adv, clip_low=0.2, clip_high=0.28, loss_tokens=500)
    found.loss.backward()
    assert new.grad is not None
    assert torch.equal(new.grad == 0, found.clipped)
    assert 0.1 < found.clipped.float().mean() < 0.6
    expected = -torch.exp(new - old) * adv / 500
    assert torch.allclose(new.grad[~found.clipped], expected[~found.clipped].detach(), rtol=1e-5)


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    new, _, adv = tokens(50)
    token_loss(new, new.detach(), adv, clip_low=0.2, clip_high=0.28, loss_tokens=50).loss.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -adv / 50)


def test_the_sum_over_parts_does_not_depend_on_the_split() -> None:
    whole, old, adv = tokens(300)
    token_loss(whole, old, adv, clip_low=0.2, clip_high=0.28, loss_tokens=300).loss.backward()
    parts = whole.detach().clone().requires_grad_()
    for part in (slice(0, 7), slice(7, 120), slice(120, 300)):
        token_loss(parts[part], old[part], adv[part], clip_low=0.2, clip_high=0.28, loss_tokens=300).loss.backward()
    torch.testing.assert_close(parts.grad, whole.grad)


def test_the_supervised_loss_is_the_mean_negative_log_likelihood() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -6.0])
    assert supervised.token_loss(logprobs, loss_tokens=3).item() == 3.0


def test_min_usable_cannot_exceed_the_group() -> None:
    with pytest.raises(ValidationError, match="min_usable is 5, but a group has 4 members"):
        AlgorithmConfig(group_size=4, min_usable=5)
