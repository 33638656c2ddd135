"""The child's end of the protocol: what engine and trainer hosts share.

Invariants: the child is gone at most a second after its parent, also when its main thread is stuck in a computation (a
reader thread sees the socket end, and the kernel's parent-death signal covers an interpreter that is stuck as a whole);
it takes its process group, that is its own children, with it; an exception that ends the child reaches the parent as a
``fatal`` event with the exception's own text.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from libra.resources.errors import ConfigError, LibraError
from libra.tasks.child.frames import Decoder, Message, encode
from libra.tasks.child.guard import announce_host

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Request:
    """What the parent asks for; ``id`` is None when it wants no reply."""

    op: str
    args: dict[str, Any]
    id: int | None


class Channel:
    """The socket to the parent: requests in order, replies and events out. Requests are read by a thread of its own."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._incoming: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="parent-reader", daemon=True).start()

    def config(self) -> dict[str, Any]:
        """The config that the parent sent first. Also takes over the parent's import path."""
        message = self._incoming.get()
        sys.path.extend(path for path in message["sys_path"] if path not in sys.path)
        config: dict[str, Any] = message["config"]
        return config

    def requests(self, timeout: float | None) -> Iterator[Request]:
        """The requests that have arrived; waits up to ``timeout`` seconds (None: for ever) for the first one."""
        try:
            message = self._incoming.get(timeout=timeout) if timeout != 0 else self._incoming.get_nowait()
            while True:
                yield Request(message["op"], message["args"], message["id"])
                message = self._incoming.get_nowait()
        except queue.Empty:
            return

    def event(self, name: str, /, **fields: Any) -> None:
        """Tell the parent something it did not ask for."""
        self._socket.sendall(encode({"event": name, "fields": fields}))

    def reply(self, request: Request, result: Any) -> None:
        """Answer a request."""
        if request.id is not None:
            self._socket.sendall(encode({"reply": request.id, "result": result}))

    def refuse(self, request: Request, error: Exception) -> None:
        """Answer a request with an error; its traceback goes to the log."""
        traceback.print_exception(error)
        if request.id is not None:
            self._socket.sendall(encode({"reply": request.id, "error": [type(error).__name__, error_text(error)]}))

    def _read(self) -> None:
        decoder = Decoder()
        try:
            while data := self._socket.recv(_READ_BYTES):
                for message in decoder.feed(data):
                    self._incoming.put(message)
        except (OSError, LibraError):
            traceback.print_exc()
        end_process_group()


def run_child(main: Callable[[Channel], None]) -> None:
    """Run ``main`` as the child's whole life. It returns after the parent's ``close``."""
    faulthandler.enable()
    # The parent ends its children itself; Ctrl-C in a terminal reaches the whole foreground group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    announce_host()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        main(channel)
    except BaseException as error:  # noqa: BLE001 - it ends the process, and nothing is left to run
        channel.event("fatal", type=type(error).__name__, text=error_text(error))
        traceback.print_exc()
        sys.stderr.flush()
        # At once: to take a large library's interpreter down in good order takes seconds in which the role waits.
        os._exit(1)


def error_text(error: BaseException) -> str:
    """The error's own words: a user-facing error says all itself, any other is named by its type."""
    return str(error) if isinstance(error, LibraError) else f"{type(error).__name__}: {error}"


def unknown_op(request: Request, known: tuple[str, ...]) -> ConfigError:
    """The error for a request that a host does not know."""
    return ConfigError(f"unknown request {request.op!r}; this host answers {', '.join(known)}")


def end_process_group() -> None:
    """End this process at once, and those it started if it leads their group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            end_process_group()
