"""The engine's process: ``python -m libra.tasks.child.engine_host FD``.

Config: ``engine`` (EngineConfig as a dict), ``tokenizer`` (path or None), ``deterministic``, ``place`` (`Place` as a
dict). One thread drives the engine: it takes the requests that have arrived, advances the engine by a step while it is
busy, and sleeps when there is nothing to do, but for a look every `CHECK_SECONDS` at whether the engine is whole.
Invariants: every ``submit`` is answered by exactly one entry of a ``generated`` event; an exception in `Engine.step` or
`Engine.check` ends the process, with the engine's own text as the reason.

Requests: ``submit`` (the fields of `GenerateRequest`), ``abort`` (``request``), ``release`` (``sequences``), ``load``
(``version``, ``path``, ``digest`` → ``{"version", "kv_layout", "kv_room"}``, layout and room as dicts, the layout maybe
None), ``stats`` (→ the fields of `EngineStats`), ``close``. Events: ``ready``, ``generated`` (``ended``: the fields of
`Generated` of each), ``stats`` (when they have changed, at most once a second).
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from libra.resources.errors import LibraError
from libra.resources.types import KVRoom, WeightVersion
from libra.tasks.child.guard import end_with_host
from libra.tasks.child.host import Channel, Request, error_text, run_child, unknown_op
from libra.tasks.engines.base import Engine, EngineConfig, Generated, GenerateRequest, Place, nothing_sampled
from libra.tasks.registry import engine_class

STATS_SECONDS = 1.0
CHECK_SECONDS = 1.0
"""How long an idle engine may be broken before its process notices."""
OPS = ("submit", "abort", "release", "load", "stats", "close")


def main(channel: Channel) -> None:
    """Build the engine, then serve until ``close``."""
    config = channel.config()
    settings = EngineConfig(**config["engine"])
    engine = engine_class(settings.kind)(
        settings,
        tokenizer_path=config["tokenizer"],
        deterministic=config["deterministic"],
        place=Place(**config["place"]),
    )
    channel.event("ready", slots=settings.slots)
    try:
        EngineHost(channel, engine, KVRoom(settings.slots * settings.max_context, 0)).run()
    finally:
        engine.close()


class EngineHost:
    """The loop between the channel and one engine. ``room``: what its KV cache holds if it does not say."""

    def __init__(self, channel: Channel, engine: Engine, room: KVRoom) -> None:
        self._channel, self._engine, self._room = channel, engine, room
        self._open = True
        self._pushed = 0.0
        self._reported = True

    def run(self) -> None:
        """Serve until ``close``."""
        while self._open:
            for request in self._channel.requests(self._patience()):
                self._handle(request)
                self._reported = False
            if self._engine.busy:
                self._send(self._engine.step())
                self._reported = False
            else:
                self._engine.check()
            self._push_stats()

    def _patience(self) -> float:
        """Seconds to wait for a request: none while busy; when idle, until the next look, or until changed stats are
        due."""
        if self._engine.busy:
            return 0.0
        due = CHECK_SECONDS if self._reported else self._pushed + STATS_SECONDS - time.monotonic()
        return min(max(due, 0.0), CHECK_SECONDS)

    def _handle(self, request: Request) -> None:
        args = request.args
        match request.op:
            case "submit":
                self._submit(GenerateRequest(**{name: _as_tuple(value) for name, value in args.items()}))
            case "abort":
                self._engine.abort(args["request"])
            case "release":
                for sequence in args["sequences"]:
                    self._engine.release(sequence)
            case "load":
                self._load(request)
            case "stats":
                self._channel.reply(request, asdict(self._engine.stats()))
            case "close":
                self._open = False
            case _:
                self._channel.refuse(request, unknown_op(request, OPS))

    def _submit(self, request: GenerateRequest) -> None:
        try:
            self._engine.submit(request)
        except (ValueError, LibraError) as error:
            # Only this request is wrong; the others go on.
            self._send([nothing_sampled(request, error=error_text(error))])

    def _load(self, request: Request) -> None:
        try:
            self._engine.load(WeightVersion(**request.args))
        except LibraError as error:
            self._channel.refuse(request, error)
        else:
            layout, room = self._engine.kv_layout, self._engine.kv_room or self._room
            kv = {"kv_layout": None if layout is None else layout.to_json(), "kv_room": asdict(room)}
            self._channel.reply(request, {"version": self._engine.version, **kv})

    def _send(self, ended: list[Generated]) -> None:
        if ended:
            self._channel.event("generated", ended=[generated_to_wire(one) for one in ended])

    def _push_stats(self) -> None:
        now = time.monotonic()
        if not self._reported and now - self._pushed >= STATS_SECONDS:
            self._pushed, self._reported = now, True
            self._channel.event("stats", **asdict(self._engine.stats()))


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def generated_to_wire(generated: Generated) -> dict[str, Any]:
    """The fields of a `Generated` (arrays stay arrays)."""
    return {name: getattr(generated, name) for name in Generated.__slots__}


if __name__ == "__main__":
    run_child(main)
elif __name__ == "__mp_main__":
    # A process that the engine has started by multiprocessing imports this module first of all.
    end_with_host()
