"""Host memory that a GPU copies from and to at full speed: registered with CUDA where there is a device, locked
otherwise.

Invariants: importing this needs no cuda-python and makes no CUDA context; `pin` never fails for want of a GPU or of
permission, it says what it could do. A registration belongs to one process and must be released before the memory is
unmapped.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from libra.resources.errors import KVError

Kind = Literal["cuda", "locked", "plain"]


@dataclass(slots=True)
class Pin:
    """What became of memory: registered for ``cuda``, ``locked`` in RAM, or ``plain`` as it was. ``why_not`` says what
    stood in the way of something better ('' if nothing)."""

    kind: Kind
    nbytes: int
    why_not: str = ""
    _undo: Callable[[], None] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Undo it; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


def pin(memory: NDArray[np.uint8], writable: bool) -> Pin:
    """Pin ``memory`` (contiguous, page-aligned) for this process and its current CUDA device.

    ``writable`` says how it is mapped: a read-only mapping can be registered only on devices that support that."""
    if not memory.flags.c_contiguous:
        raise KVError(f"cannot pin memory of strides {memory.strides}: it must be contiguous")
    address, nbytes = int(memory.ctypes.data), int(memory.nbytes)
    undo, no_cuda = _register(address, nbytes, writable)
    if undo is not None:
        return Pin("cuda", nbytes, "", undo)
    undo, no_lock = _lock(address, nbytes)
    if undo is not None:
        return Pin("locked", nbytes, no_cuda, undo)
    return Pin("plain", nbytes, f"{no_cuda}; {no_lock}")


def cuda_runtime() -> tuple[Any | None, str]:
    """``cuda.bindings.runtime`` where it finds a GPU; or None and why not, with what would help."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None, "cuda-bindings is not installed (pip install 'dask-libra[gpu]')"
    error, devices = runtime.cudaGetDeviceCount()
    if error != runtime.cudaError_t.cudaSuccess:
        return None, f"no GPU ({cuda_error(runtime, error)})"
    return (runtime, "") if devices else (None, "no GPU")


def _register(address: int, nbytes: int, writable: bool) -> tuple[Callable[[], None] | None, str]:
    """cudaHostRegister; how to undo it, or None and why it could not be."""
    runtime, why_not = cuda_runtime()
    if runtime is None:
        return None, why_not
    ok = runtime.cudaError_t.cudaSuccess
    flags = runtime.cudaHostRegisterPortable | runtime.cudaHostRegisterMapped
    if not writable:
        error, device = runtime.cudaGetDevice()
        if error == ok:
            attribute = runtime.cudaDeviceAttr.cudaDevAttrHostRegisterReadOnlySupported
            error, supported = runtime.cudaDeviceGetAttribute(attribute, device)
        if error != ok or not supported:
            return None, "this GPU cannot register a read-only mapping: attach to the arena writable"
        flags |= runtime.cudaHostRegisterReadOnly
    (error,) = runtime.cudaHostRegister(address, nbytes, flags)
    if error != ok:
        runtime.cudaGetLastError()  # else the next CUDA call of this process reports it as its own
        return None, f"cudaHostRegister of {nbytes} B failed: {cuda_error(runtime, error)}"

    def undo() -> None:
        (error,) = runtime.cudaHostUnregister(address)
        if error != ok:
            raise KVError(f"cudaHostUnregister of {nbytes} B failed: {cuda_error(runtime, error)}")

    return undo, ""


def _lock(address: int, nbytes: int) -> tuple[Callable[[], None] | None, str]:
    """mlock; how to undo it, or None and why it could not be."""
    libc = ctypes.CDLL(None, use_errno=True)
    for function in (libc.mlock, libc.munlock):
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    if libc.mlock(address, nbytes) != 0:
        return None, f"mlock of {nbytes} B: {os.strerror(ctypes.get_errno())} (raise ulimit -l)"

    def undo() -> None:
        libc.munlock(address, nbytes)

    return undo, ""


def cuda_error(runtime: Any, error: Any) -> str:
    """What CUDA calls an error."""
    _, text = runtime.cudaGetErrorString(error)
    return text.decode() if isinstance(text, bytes) else str(text)
