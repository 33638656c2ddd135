"""The seam between the driver and Dask: how graphs, releases and messages reach the scheduler and how results return.

Invariants of every transport: messages sent through one transport arrive in order; a result or an error of a key is
reported at most once, after the key's segments; a key is released by the scheduler plugin as its result is forwarded,
by `release` otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Node:
    """One task: ``body(blob)``, or ``body(blob, result of after)`` when it depends on another task."""

    key: str
    body: Callable[..., Any]
    blob: bytes
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """What places a rollout that no tool task precedes: the ``context`` tokens before it, and the key of the
    trajectory's ``prompt``, the same for all members of a group and in every epoch."""

    context: int
    prompt: str


@dataclass(frozen=True, slots=True)
class Listener:
    """What a transport calls, on the event loop: a wanted key's result, its failure, segments that residences have
    finished (key, packed segment), an event of the plugin."""

    on_result: Callable[[str, dict[str, Any]], None]
    on_error: Callable[[str, BaseException], bool]
    """Returns whether the key was the listener's."""
    on_segments: Callable[[Iterable[tuple[str, bytes]]], None]
    on_event: Callable[[dict[str, Any]], None]


class Transport(ABC):
    """One attachment of a Dask client to the scheduler plugin."""

    answers: ClassVar[str]
    """How results and events come (`libra.resources.wire.CLAIM`): ``stream`` or ``topic``."""

    @abstractmethod
    def attach(self, listener: Listener) -> None:
        """Start reporting to ``listener``."""

    @abstractmethod
    def detach(self) -> None:
        """Stop reporting; the client is as it was before `attach`."""

    @abstractmethod
    def submit(self, nodes: Sequence[Node], wanted: Iterable[str]) -> None:
        """Send one graph; the results of ``wanted`` will be reported."""

    @abstractmethod
    def release(self, keys: Sequence[str]) -> None:
        """No longer want ``keys``: Dask cancels what has not run."""

    @abstractmethod
    def send(self, op: str, **fields: Any) -> None:
        """A one-way message to the plugin (`libra.resources.wire`), ordered with graphs."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the scheduler is still connected."""
