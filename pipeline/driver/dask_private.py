"""Everything that leans on names of Dask that are not public API, and nothing else.

Used of distributed 2026.8 (checked by `available`): ``Client._send_to_scheduler``, ``Client._stream_handlers``, the
messages ``update-graph`` and ``client-releases-keys``, ``distributed.client.SpanMetadata``, ``dask._expr.LLGExpr`` and
``BatchedSend.recent_message_log`` of ``Client.scheduler_comm``.
What it buys: no ``Future`` object, no hashing of arguments and no gather round trip for a task, which together cost
more than the task itself. `libra.pipeline.driver.dask_public` does the same with public API, slower.

Invariant: a client's own handlers still see every key that is not the listener's, so a user's futures on the same
client keep working.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import distributed
from dask._expr import LLGExpr
from dask._task_spec import Task, TaskRef
from distributed import Client
from distributed.client import SpanMetadata
from distributed.core import clean_exception
from distributed.protocol import Serialized, serialize, to_serialize
from distributed.protocol.serialize import ToPickle

from libra.pipeline.driver.transport import Listener, Node, Transport
from libra.resources import wire

TESTED = "2026.8"


def available(client: Client) -> bool:
    """Whether this version of distributed is one that the names above were tested with."""
    names = ("_send_to_scheduler", "_stream_handlers", "scheduler_comm")
    return distributed.__version__.startswith(TESTED) and all(hasattr(client, name) for name in names)


class StreamTransport(Transport):
    """Raw graph messages on the client's stream; results on its report stream."""

    answers = "stream"

    def __init__(self, client: Client) -> None:
        self._client = client
        self._saved: dict[str, Any] = {}
        self._graphs = 0

    def attach(self, listener: Listener) -> None:
        # Meant for debugging; it would keep the last 1,000 graphs, contexts and all, from being freed.
        self._client.scheduler_comm.recent_message_log = deque(maxlen=0)
        handlers = self._client._stream_handlers
        self._saved = {op: handlers[op] for op in ("task-erred", "cancelled-keys", "lost-data")}
        saved = self._saved

        def erred(key: str, exception: Any = None, traceback: Any = None) -> None:
            _, error, _ = clean_exception(exception=exception, traceback=traceback)
            if not listener.on_error(key, error or RuntimeError(f"{key} failed without a reason")):
                saved["task-erred"](key=key, exception=exception, traceback=traceback)

        def cancelled(keys: Sequence[str], reason: str | None = None, msg: str | None = None) -> None:
            lost = RuntimeError(f"cancelled by the scheduler: {msg or reason or 'no reason given'}")
            foreign = [key for key in keys if not listener.on_error(key, lost)]
            if foreign:
                saved["cancelled-keys"](keys=foreign, reason=reason, msg=msg)

        def lost_data(key: str) -> None:
            if not listener.on_error(key, RuntimeError("its data was lost with a worker")):
                saved["lost-data"](key=key)

        handlers["task-erred"] = erred
        handlers["cancelled-keys"] = cancelled
        handlers["lost-data"] = lost_data
        handlers[wire.RESULT] = listener.on_result
        handlers[wire.GROWN] = listener.on_segments
        handlers[wire.EVENT] = lambda **fields: listener.on_event(fields)

    def detach(self) -> None:
        handlers = self._client._stream_handlers
        handlers.update(self._saved)
        for op in (wire.RESULT, wire.GROWN, wire.EVENT):
            # Late messages of a run that has ended find nobody, and that is not an error.
            handlers[op] = lambda **fields: None
        self._saved = {}

    def submit(self, nodes: Sequence[Node], wanted: Iterable[str]) -> None:
        self._graphs += 1
        graph = {
            node.key: Task(node.key, node.body, node.blob, *((TaskRef(node.after),) if node.after else ()))
            for node in nodes
        }
        # A given token avoids hashing every argument.
        expression = LLGExpr(graph, _determ_token=f"libra-{id(self)}-{self._graphs}")
        self._client._send_to_scheduler(
            {
                "op": "update-graph",
                "expr_ser": Serialized(*serialize(to_serialize(expression), on_error="raise")),
                "keys": set(wanted),
                "internal_priority": {key: i for i, key in enumerate(graph)},
                "submitting_task": None,
                "fifo_timeout": 0,
                "actors": None,
                "code": ToPickle(()),
                "annotations": ToPickle({}),
                "span_metadata": ToPickle(SpanMetadata(collections=[{"type": "libra"}])),
            }
        )

    def release(self, keys: Sequence[str]) -> None:
        self._client._send_to_scheduler({"op": "client-releases-keys", "keys": list(keys), "client": self._client.id})

    def send(self, op: str, **fields: Any) -> None:
        self._client._send_to_scheduler({"op": op, **fields})

    @property
    def alive(self) -> bool:
        return bool(self._client.status == "running")
