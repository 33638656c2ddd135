"""The same transport with Dask's public API only: slower, for versions of Dask that `dask_private` was not tested with.

Graphs go by ``Client.get(sync=False)``, whose futures hold the keys; messages go by RPC; results and events come as
messages on a topic of the plugin's, to which a client can subscribe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from dask._task_spec import Task, TaskRef
from distributed import Client, Future

from libra.pipeline.driver.transport import Listener, Node, Transport
from libra.resources import wire


class TopicTransport(Transport):
    """Futures for wanted keys; results and events on the topic `wire.topic`."""

    answers = "topic"

    def __init__(self, client: Client) -> None:
        self._client = client
        self._futures: dict[str, Future] = {}
        self._listener: Listener | None = None
        self._outbox: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._sender: asyncio.Task[None] | None = None
        self._broken = False

    def attach(self, listener: Listener) -> None:
        self._listener = listener
        self._client.subscribe_topic(wire.topic(self._client.id), self._on_message)
        self._sender = asyncio.get_running_loop().create_task(self._send_all())

    def detach(self) -> None:
        self._client.unsubscribe_topic(wire.topic(self._client.id))
        if self._sender is not None:
            self._sender.cancel()
        self._futures.clear()

    def submit(self, nodes: Sequence[Node], wanted: Iterable[str]) -> None:
        graph = {
            node.key: Task(node.key, node.body, node.blob, *((TaskRef(node.after),) if node.after else ()))
            for node in nodes
        }
        self._outbox.put_nowait(("graph", {"graph": graph, "wanted": list(wanted)}))

    def release(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._futures.pop(key, None)

    def send(self, op: str, **fields: Any) -> None:
        self._outbox.put_nowait((op, fields))

    @property
    def alive(self) -> bool:
        return bool(self._client.status == "running") and not self._broken

    async def _send_all(self) -> None:
        """Messages and graphs in order: an RPC is answered before what follows it is sent."""
        while True:
            op, fields = await self._outbox.get()
            if op == "graph":
                self._submit_now(fields["graph"], fields["wanted"])
                continue
            try:
                await getattr(self._client.scheduler, wire.rpc(op))(**fields)
            except OSError:
                self._broken = True  # `alive` says so; whoever waits is told that the scheduler is gone
                return

    def _submit_now(self, graph: dict[str, Task], wanted: list[str]) -> None:
        for future in self._client.get(graph, wanted, sync=False):
            self._futures[future.key] = future
            future.add_done_callback(self._on_done)

    def _on_done(self, future: Future) -> None:
        if future.status in ("error", "cancelled", "lost") and future.key in self._futures:
            self._client.loop.add_callback(self._report_failure, future)

    async def _report_failure(self, future: Future) -> None:
        error = (
            await future.exception() if future.status == "error" else RuntimeError(f"{future.status} by the scheduler")
        )
        if self._listener is not None and self._futures.pop(future.key, None) is not None:
            self._listener.on_error(future.key, error)

    def _on_message(self, event: tuple[float, dict[str, Any]]) -> None:
        message = dict(event[1])
        if self._listener is None:
            return
        op = message.pop("op")
        if op == wire.RESULT:
            self._futures.pop(message["key"], None)
            self._listener.on_result(message["key"], message["value"])
        elif op == wire.GROWN:
            self._listener.on_segments(message["segments"])
        else:
            self._listener.on_event(message)
