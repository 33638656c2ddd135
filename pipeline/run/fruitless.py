"""Why groups gave nothing to learn from: equal rewards, or failures, and which was the commonest.

Invariant: pure; counts the trajectories since the last group that could be trained on.
"""

from __future__ import annotations

from collections import Counter


class Fruitless:
    """Told of every trajectory that ends; its `message` ends the run."""

    def __init__(self) -> None:
        self._rewarded = 0
        self._failures: Counter[str] = Counter()

    def reset(self) -> None:
        """A group could be trained on."""
        self._rewarded = 0
        self._failures.clear()

    def ended(self, trajectory: str, failure: str | None) -> None:
        """``trajectory`` ended with a reward, or with ``failure`` (its kind and reason)."""
        if failure is None:
            self._rewarded += 1
        else:
            # Without its own name, so that equal failures of many are counted as one.
            self._failures[" ".join(failure.replace(trajectory, "a trajectory").split())] += 1

    def message(self, limit: int) -> str:
        """What ends the run after ``limit`` groups in a row."""
        begin = f"{limit} groups in a row (groups.max_returned) gave nothing to learn from: "
        failed = self._failures.total()
        if failed <= self._rewarded:
            also = f"; {failed} trajectories failed, {self._commonest()}" if failed else ""
            return begin + (
                f"all members of one had the same reward, or too few had any{also}. "
                "Look at the rewards in metrics.jsonl: the tasks may be too hard or too easy for this policy."
            )
        return begin + f"{failed} of their {failed + self._rewarded} trajectories failed, {self._commonest()}."

    def _commonest(self) -> str:
        (reason, times), *_ = self._failures.most_common(1)
        return f"most often ({times} times) so: {reason}"
