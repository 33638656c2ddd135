"""The driver: turns awaited calls into micro-batched graphs of Dask tasks.

Invariants: every call of `submit` gets exactly one outcome (result, error, or cancellation); everything submitted
within a window travels in one graph, and a key's ``OPEN`` note travels before its graph; at most ``max_inflight``
wanted keys are in the cluster, later ones wait in order (backpressure).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from libra.pipeline.driver.transport import Listener, Node, Transport
from libra.resources import wire

Outcome = dict[str, Any]


class Driver:
    """Submits nodes and resolves one future for each wanted key. Lives on one event loop: that of the Dask client.

    ``window``: seconds that submissions are gathered for; ``max_batch``: wanted keys of one graph at most;
    ``on_event``: called with each event of the plugin.
    """

    def __init__(
        self,
        transport: Transport,
        token: str,
        *,
        window: float,
        max_inflight: int,
        on_event: Callable[[dict[str, Any]], None],
        max_batch: int = 512,
    ) -> None:
        self._transport, self._token = transport, token
        self._window, self._max_inflight, self._max_batch = window, max_inflight, max_batch
        self._loop = asyncio.get_running_loop()
        self._pending: dict[str, asyncio.Future[Outcome]] = {}
        self._queue: deque[tuple[Sequence[Node], int | None]] = deque()
        self._sent: set[str] = set()
        self._released: list[str] = []
        self._ended: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self.graphs = 0
        self.results = 0
        self.last_result = time.monotonic()
        transport.attach(Listener(self._on_result, self._on_error, on_event))

    @property
    def inflight(self) -> int:
        """Wanted keys without an outcome, waiting ones included."""
        return len(self._pending)

    async def submit(self, nodes: Sequence[Node], context: int | None = None) -> Outcome:
        """Run ``nodes`` (in order, the last one is wanted) and return what its body left as its result.

        ``context``: context tokens of a rollout that no tool precedes, for its placement. Raises what the body raised;
        cancelling the caller releases the tasks.
        """
        key = nodes[-1].key
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self._pending[key] = future
        self._queue.append((nodes, context))
        self._arm()
        try:
            return await future
        except asyncio.CancelledError:
            self._drop(key)
            raise

    def end(self, trajectory: str) -> None:
        """Tell the cluster that a trajectory has ended: its KV and its session may go."""
        self._ended.append(trajectory)
        self._arm()

    def fail(self, key: str, error: BaseException) -> None:
        """One pending call fails with ``error`` (the plugin gave its key up)."""
        self._on_error(key, error)

    def close(self) -> None:
        """Release what is pending and stop listening."""
        for key in list(self._pending):
            self._drop(key)
        if self._transport.alive:
            self._flush()
        elif self._timer is not None:
            self._timer.cancel()
        self._transport.detach()

    def _arm(self) -> None:
        if len(self._queue) >= self._max_batch:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._window, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._send_graph()
        if self._released:
            released, self._released = self._released, []
            self._transport.release(released)
        if self._ended:
            ended, self._ended = self._ended, []
            self._transport.send(wire.END, token=self._token, trajectories=ended)

    def _send_graph(self) -> None:
        nodes: list[Node] = []
        wanted: list[str] = []
        contexts: dict[str, int] = {}
        while self._queue and len(self._sent) < self._max_inflight and len(wanted) < self._max_batch:
            chain, context = self._queue.popleft()
            key = chain[-1].key
            if key not in self._pending:
                continue  # cancelled before it was sent
            nodes.extend(chain)
            wanted.append(key)
            self._sent.add(key)
            if context is not None:
                contexts[key] = context
        if not nodes:
            return
        if contexts:
            self._transport.send(wire.OPEN, token=self._token, contexts=contexts)
        self._transport.submit(nodes, wanted)
        self.graphs += 1
        if self._queue and len(self._sent) < self._max_inflight:
            self._arm()

    def _on_result(self, key: str, value: dict[str, Any]) -> None:
        self.results += 1
        self.last_result = time.monotonic()
        self._resolve(key, value=value)

    def _on_error(self, key: str, error: BaseException) -> bool:
        if key not in self._pending:
            return False
        self._released.append(key)
        self._resolve(key, error=error)
        self._arm()
        return True

    def _resolve(self, key: str, *, value: dict[str, Any] | None = None, error: BaseException | None = None) -> None:
        self._sent.discard(key)
        future = self._pending.pop(key, None)
        if self._queue:
            self._arm()
        if future is None or future.done():
            return  # cancelled meanwhile
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value or {})

    def _drop(self, key: str) -> None:
        future = self._pending.pop(key, None)
        if future is not None and not future.done():
            future.cancel()
        if key in self._sent:
            self._sent.discard(key)
            self._released.append(key)
            self._arm()
