"""A GPU in host memory, for machines without one: stands in for the CUDA packages in a process that runs this first.

The kernels are those of native/src/pages.cu, compiled as C++ and run thread by thread; copies are memmoves, and streams
do at once what they are given. So it shows that what is launched moves the right bytes, and nothing about a real GPU:
no timing, no ordering, no visibility of memory.

Usage: ``python -m emulated_cuda MODULE ARGUMENTS …`` runs the module's ``main(arguments)``.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import tempfile
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

_PRELUDE = """
struct Index { unsigned x; };
static Index blockIdx, threadIdx, blockDim, gridDim;
#define __global__
#define __device__
#include "{source}"
using Kernel = void(const u64*, u64, u64);
extern "C" void emulate(Kernel* kernel, unsigned grid, unsigned block, const u64* job, u64 extents, u64 gather) {
  gridDim.x = grid;
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) kernel(job, extents, gather);
}
"""


class Kernels:
    """The kernels of a ``.cu`` file as functions of this process."""

    def __init__(self, source: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            code, library = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
            code.write_text(_PRELUDE.replace("{source}", str(source)))
            compiler = os.environ.get("CXX", "c++")
            command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-o", str(library), str(code)]
            subprocess.run(command, check=True, timeout=120)
            self._library = ctypes.CDLL(str(library))

    def launch(self, name: str, grid: int, block: int, job: int, extents: int, gather: int) -> None:
        """Run every thread of a launch; ``job`` and ``extents`` are addresses."""
        kernel = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        u64 = ctypes.c_uint64
        self._library.emulate(kernel, grid, block, u64(job), u64(extents), u64(gather))


class _Error(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1


class Runtime:
    """The functions of ``cuda.bindings.runtime`` that are used, over host memory: each returns (error, result …)."""

    cudaError_t = _Error
    cudaMemoryType = IntEnum("cudaMemoryType", {"cudaMemoryTypeUnregistered": 0, "cudaMemoryTypeHost": 1})
    cudaMemcpyKind = IntEnum("cudaMemcpyKind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2})
    cudaDeviceAttr = IntEnum("cudaDeviceAttr", {"cudaDevAttrHostRegisterReadOnlySupported": 113})
    cudaMemcpySrcAccessOrder = IntEnum("cudaMemcpySrcAccessOrder", {"cudaMemcpySrcAccessOrderStream": 1})
    cudaMemcpyFlags = IntEnum("cudaMemcpyFlags", {"cudaMemcpyFlagPreferOverlapWithCompute": 1})
    cudaMemcpyAttributes = SimpleNamespace
    cudaHostRegisterPortable, cudaHostRegisterMapped, cudaHostRegisterReadOnly, cudaEventDisableTiming = 1, 2, 8, 2

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}
        self._allocated: dict[int, np.ndarray] = {}

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return _Error.cudaSuccess, 1

    def cudaGetDevice(self) -> tuple[Any, ...]:
        return _Error.cudaSuccess, 0

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return _Error.cudaSuccess, 1

    def cudaDriverGetVersion(self) -> tuple[Any, ...]:
        return _Error.cudaSuccess, 13000

    def cudaGetErrorString(self, error: Any) -> tuple[Any, ...]:
        return _Error.cudaSuccess, _Error(error).name.encode()

    def cudaGetLastError(self) -> tuple[Any, ...]:
        return (_Error.cudaSuccess,)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        self._registered[address] = nbytes
        return (_Error.cudaSuccess,)

    def cudaHostUnregister(self, address: int) -> tuple[Any, ...]:
        return (_Error.cudaSuccess if self._registered.pop(address, 0) else _Error.cudaErrorInvalidValue,)

    def cudaPointerGetAttributes(self, address: int) -> tuple[Any, ...]:
        inside = any(first <= address < first + nbytes for first, nbytes in self._registered.items())
        return _Error.cudaSuccess, SimpleNamespace(type=int(inside), devicePointer=address if inside else 0)

    def cudaMalloc(self, nbytes: int) -> tuple[Any, ...]:
        memory = np.empty(nbytes + 256, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self._allocated[address] = memory
        return _Error.cudaSuccess, address

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        return (_Error.cudaSuccess if self._allocated.pop(address, None) is not None else _Error.cudaErrorInvalidValue,)

    def cudaMemcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> tuple[Any, ...]:
        ctypes.memmove(to, source, nbytes)
        return (_Error.cudaSuccess,)

    def cudaMemsetAsync(self, to: int, value: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        ctypes.memset(to, value, nbytes)
        return (_Error.cudaSuccess,)

    def cudaMemcpyBatchAsync(
        self, to: list[int], source: list[int], sizes: list[int], count: int, attributes: list[Any], first: list[int],
        kinds: int, stream: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        if not (len(to) == len(source) == len(sizes) == count and len(attributes) == len(first) == kinds and stream):
            return (_Error.cudaErrorInvalidValue,)
        for target, origin, size in zip(to, source, sizes, strict=True):
            ctypes.memmove(target, origin, size)
        return (_Error.cudaSuccess,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return _Error.cudaSuccess, 11

    def cudaEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        return (_Error.cudaSuccess,)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any, ...]:
        return (_Error.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return (_Error.cudaSuccess,)


class _Device:
    arch, name = "90", "an emulated GPU"

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id

    def set_current(self) -> None:
        pass

    def create_stream(self) -> Any:
        return SimpleNamespace(handle=77)


class _Program:
    def __init__(self, code: str, kind: str, options: Any) -> None:
        self._kernels = Kernels(Path(options.include_path[0]) / options.name)

    def compile(self, kind: str) -> Any:
        return SimpleNamespace(get_kernel=lambda name: (self._kernels, name))


def _launch(stream: Any, config: Any, kernel: Any, *arguments: int) -> None:
    kernels, name = kernel
    kernels.launch(name, config.grid, config.block, *arguments)


def install() -> None:
    """Put the stand-ins where ``import cuda…`` finds them."""
    top, bindings, core = ModuleType("cuda"), ModuleType("cuda.bindings"), ModuleType("cuda.core")
    nvrtc = ModuleType("cuda.bindings.nvrtc")
    vars(nvrtc)["nvrtcVersion"] = lambda: (0, 13, 0)
    vars(bindings).update(runtime=Runtime(), nvrtc=nvrtc)
    vars(core).update(
        Device=_Device, Program=_Program, ProgramOptions=SimpleNamespace, LaunchConfig=SimpleNamespace, launch=_launch
    )
    vars(top).update(bindings=bindings, core=core)
    sys.modules |= {"cuda": top, "cuda.bindings": bindings, "cuda.bindings.nvrtc": nvrtc, "cuda.core": core}


if __name__ == "__main__":
    install()
    sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
