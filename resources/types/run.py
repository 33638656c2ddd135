"""What a run tells the scheduler plugin and the workers when it claims the cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Plain values only, so that it travels through Dask's msgpack without pickle.

    ``run``: eight hex digits, part of every task key. ``name``: what people call the run. ``run_dir``: its folder.
    ``engine``, ``trainer``, ``environment``: the resolved configs of the three seams (each with ``kind``).
    ``buckets``: ``[tp, max_context | None, instances]`` in ascending order of ``max_context``. ``roles``: workers
    wanted a role. ``tokenizer``: path of ``tokenizer.json``. ``temperature`` is that of training rollouts and of the
    loss; ``eval_temperature`` that of held-out ones. ``max_turn_tokens``, ``max_context``: limits in tokens.
    ``bind_seconds``: how long a continuation may stay unbound; ``start_seconds``: how long a role may take to be ready;
    ``load_seconds``: how long an engine may take to load a version; ``stop_seconds``: how long a role may take to stop.
    ``policy``: the bucket policy (``kind`` and its options); ``learn_from``: files with what it learned in other runs,
    ``learn_keep`` (0 to 1): what that is worth here. ``pool``: how roles are restarted and drained, where the
    plugin's defaults shall not hold (``restarts``, ``backoff``, ``backoff_most``, ``stable``, ``drain``). ``planner``:
    whether and how the plugin replans (`OnlineConfig`; empty: not at all).
    """

    run: str
    name: str
    run_dir: str
    seed: int
    eval_seed: int
    deterministic: bool
    engine: dict[str, Any]
    trainer: dict[str, Any]
    algorithm: dict[str, Any]
    environment: dict[str, Any]
    tokenizer: str
    buckets: list[list[int | None]]
    roles: dict[str, int]
    temperature: float
    eval_temperature: float
    max_turn_tokens: int
    max_context: int
    bind_seconds: float
    start_seconds: float
    load_seconds: float
    stop_seconds: float
    policy: dict[str, Any] = field(default_factory=lambda: {"kind": "context_bounds"})
    learn_from: list[str] = field(default_factory=list)
    learn_keep: float = 1.0
    pool: dict[str, float] = field(default_factory=dict)
    planner: dict[str, Any] = field(default_factory=dict)

    @property
    def inline(self) -> bool:
        """Whether tools run inside rollout tasks, one task a residence, instead of in tasks of their own."""
        return bool(self.environment.get("inline", False))

    def to_wire(self) -> dict[str, Any]:
        """A dict of plain values; `from_wire` reads it back."""
        return asdict(self)

    @classmethod
    def from_wire(cls, message: dict[str, Any]) -> Self:
        """Inverse of `to_wire`."""
        return cls(**message)
