"""The worker's end of the protocol: starts a child process and talks to it from the event loop.

Invariants: a child holds its own socket and nothing else of its parent or siblings; every call ends (with the result,
the child's own error, its death, or its deadline); a child that dies unasked is reported once, with its own last words;
`ChildProcess.stop` leaves no process of the child's group behind. What the child prints goes to its log file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from libra.resources import errors
from libra.resources.errors import DeadlineError, InfraError, LibraError
from libra.tasks.child.frames import Decoder, Message, encode

TAIL_BYTES = 4096
TAIL_LINES = 15
KILL_SECONDS = 10.0
"""How long a killed process may take to be gone."""
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)

OnEvent = Callable[[str, dict[str, Any]], None]
OnExit = Callable[[str], None]


class ChildProcess:
    """One child process. Make it with `start`; use it from the event loop that made it."""

    def __init__(self, name: str, log: Path, on_event: OnEvent, on_exit: OnExit) -> None:
        self.name, self.log = name, log
        self._on_event, self._on_exit = on_event, on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._socket: _Socket | None = None
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0
        self._fatal: str | None = None
        self._death: str | None = None
        self._stopping = False
        self._log_start = 0
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        module: str,
        config: dict[str, Any],
        *,
        name: str,
        log: Path,
        seconds: float,
        threads: int,
        on_event: OnEvent,
        on_exit: OnExit,
    ) -> Self:
        """Start ``python -m module`` with ``config`` and wait until it is ready.

        ``log``: file that the child's output is appended to. ``on_event``: called with each event's name and fields.
        ``on_exit``: called once, with why, if the child dies unasked once it is ready. Raises the child's own error if
        it cannot start, `DeadlineError` after ``seconds``.
        """
        child = cls(name, log, on_event, on_exit)
        try:
            await child._spawn(module, threads)
            child._write({"config": config, "sys_path": [path for path in sys.path if path]})
            async with asyncio.timeout(seconds):
                await asyncio.shield(child._ready)
        except TimeoutError:
            await child.stop(grace=0)
            raise DeadlineError(f"{name} to be ready", f"its process ({module})", seconds, f"Its log: {log}") from None
        except BaseException:
            await child.stop(grace=0)
            raise
        return child

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def ready(self) -> dict[str, Any]:
        """The fields of the child's ``ready`` event."""
        return self._ready.result()

    @property
    def death(self) -> str | None:
        """Why the child has ended; None while it lives."""
        return self._death

    @property
    def alive(self) -> bool:
        """Whether it can be spoken to."""
        return self._death is None and not self._stopping

    async def call(self, op: str, *, seconds: float, **args: Any) -> Any:
        """Send a request and return its result. Raises the child's error (a `LibraError` of the same type, else
        `InfraError` with the text), `InfraError` if it dies, `DeadlineError` after ``seconds``."""
        self._check_alive()
        self._calls += 1
        number = self._calls
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"op": op, "args": args, "id": number})
            async with asyncio.timeout(seconds):
                return await reply
        except TimeoutError:
            waits_for = f"{op!r} of {self.name}"
            raise DeadlineError(waits_for, f"its process {self.pid}", seconds, f"Its log: {self.log}") from None
        finally:
            del self._replies[number]

    def send(self, op: str, **args: Any) -> None:
        """Send a request that has no reply. `InfraError` if the child is dead."""
        self._check_alive()
        self._write({"op": op, "args": args, "id": None})

    async def stop(self, grace: float) -> None:
        """End the child: ask it to close, after ``grace`` seconds SIGTERM, after as long again SIGKILL, to its whole
        process group. A second call waits for the first."""
        self._stopping = True
        if self._process is None or self._watcher is None:
            return
        if self._death is None and self._socket is not None and grace > 0:
            self._write({"op": "close", "args": {}, "id": None})
            if not await self._ends_within(grace):
                self._signal(signal.SIGTERM)
                await self._ends_within(grace)
        self._signal(signal.SIGKILL)
        if not await self._ends_within(KILL_SECONDS):
            raise DeadlineError(f"{self.name} to be gone", f"the kernel (process {self.pid} was killed)", KILL_SECONDS)

    async def _spawn(self, module: str, threads: int) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            # Unbuffered: the last lines before a crash must be in the log.
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
            environment |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
            with self.log.open("ab") as output:
                self._log_start = output.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", module, str(theirs.fileno()), self.name),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env=environment,
                )
            self._watcher = asyncio.create_task(self._watch(self._process), name=f"watch {self.name}")
            loop = asyncio.get_running_loop()
            _, self._socket = await loop.create_unix_connection(lambda: _Socket(self._receive, self._broken), sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def _write(self, message: Message) -> None:
        assert self._socket is not None
        self._socket.write(encode(message))

    def _check_alive(self) -> None:
        if not self.alive:
            raise InfraError(self._death or f"{self.name} is being stopped")

    def _receive(self, message: Message) -> None:
        if "reply" in message:
            reply = self._replies.get(message["reply"])
            if reply is None or reply.done():
                return  # its caller has given up
            if "error" in message:
                reply.set_exception(_error(self.name, *message["error"]))
            else:
                reply.set_result(message["result"])
            return
        name, fields = message["event"], message["fields"]
        if name == "ready":
            self._ready.set_result(fields)
        elif name == "fatal":
            self._fatal = fields["text"]
            if not self._ready.done():
                self._fail_start(_error(self.name, fields["type"], fields["text"]))
        else:
            self._on_event(name, fields)

    def _broken(self, error: Exception) -> None:
        """The stream holds no frames: nothing the child says can be trusted any more."""
        self._fatal = self._fatal or str(error)
        self._signal(signal.SIGKILL)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        # What the child started may have outlived it.
        self._signal(signal.SIGKILL)
        if self._socket is not None:
            # Its last words may still lie in the socket.
            await self._socket.drained()
        self._death = self._epitaph(code)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(InfraError(self._death))
        if not self._ready.done():
            self._fail_start(InfraError(self._death))
        elif not self._stopping:
            self._on_exit(self._death)

    def _fail_start(self, error: LibraError) -> None:
        self._ready.set_exception(error)
        self._ready.exception()  # seen: `start` may have been cancelled meanwhile

    def _epitaph(self, code: int) -> str:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = self._fatal or self._tail() or "it said nothing"
        return f"{self.name} (process {self.pid}) ended with {how}: {words} (log: {self.log})"

    def _tail(self) -> str:
        """The last lines the child printed."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"its log cannot be read: {error}"
        return "\n".join(lines[-TAIL_LINES:]).strip()

    async def _ends_within(self, seconds: float) -> bool:
        assert self._watcher is not None
        done, _ = await asyncio.wait([self._watcher], timeout=seconds)
        return bool(done)

    def _signal(self, number: signal.Signals) -> None:
        # Once its end is known its process id may be another's.
        if self._process is not None and self._death is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


class _Socket(asyncio.Protocol):
    """Frames from and to one socket."""

    def __init__(self, receive: Callable[[Message], None], broken: Callable[[Exception], None]) -> None:
        self._receive, self._on_broken = receive, broken
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self._receive(message)
        except LibraError as error:
            self._on_broken(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    def write(self, data: bytes) -> None:
        # What is written in one turn of the loop travels in one piece: tasks come in bursts, and each piece wakes the
        # child.
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        assert self._transport is not None
        data, self._outgoing = b"".join(self._outgoing), []
        self._transport.write(data)

    async def drained(self) -> None:
        """Wait for what the dead peer has written, then close. A process that it started may hold its end open, so
        the wait is short."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._ended.wait()
        if self._transport is not None:
            self._transport.close()


def _error(name: str, kind: str, text: str) -> LibraError:
    """The child's error: of the same type if it is one of ours and is made from its text, else an `InfraError`."""
    found = vars(errors).get(kind)
    if isinstance(found, type) and issubclass(found, LibraError) and found is not DeadlineError:
        return found(text)
    return InfraError(f"{name}: {text}")
