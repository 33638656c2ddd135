"""Pages between KV tensors on a GPU and an arena in host memory, moved by the GPU: the moves of `libra.native.pages`.

There are two ways. A *kernel* (native/src/pages.cu) reads and writes registered host memory itself: it takes scattered
pages of any size, and a few multiprocessors while it runs. It is compiled by NVRTC when a process first needs it, so
that installing needs no CUDA compiler. A *batch of copies* (``cudaMemcpyBatchAsync``) is done by the copy engines; each
page costs a copy, which pays for large pages, and it is the way to memory that could not be registered.

Invariants: importing this needs no CUDA package and makes no CUDA context; a move runs on a stream of its own, after
whatever the stream that it follows held at the call, and is over when the call returns; moves into extents and moves
out of them do not wait for each other; nothing is launched for a block or an extent out of bounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from libra.native.pages import KERNELS, PageGrid
from libra.resources.errors import KVError
from libra.resources.kv.page_job import PageJob
from libra.resources.kv.pinned import cuda_error, cuda_runtime

Way = Literal["kernel", "copies"]
COPIES_FROM = 256 << 10
"""Page bytes from which on copies are taken. Derived, not measured: at 50 GB/s such a page takes 5 µs, beside 1–2 µs
that a copy costs to start; `make gpu-check` prints both ways."""
GRID, BLOCK = 32, 256
"""Thread blocks, and threads in each, of a launch: 512 KiB of reads under way, several times what a PCIe link's latency
needs, on at most 32 multiprocessors."""
INSTALL = "pip install 'dask-libra[gpu]'"


class DeviceArray(Protocol):
    """An array on a GPU, as torch and others describe theirs."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


def unavailable() -> str | None:
    """Why pages cannot be moved by a GPU in this process, and what would help; None if they can."""
    try:
        import cuda.core  # noqa: F401 - only whether it is there
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except ImportError as error:
        return f"cuda-core and cuda-bindings cannot both be imported ({error}); {INSTALL}"
    except RuntimeError as error:  # what cuda-pathfinder raises for a library that it does not find
        return f"NVRTC is not installed ({error}); {INSTALL}"
    return cuda_runtime()[1] or None


def compile_kernels(arch: str) -> Any:
    """The kernels' object code (a ``cuda.core.ObjectCode``) for ``arch``, as ``sm_90``; needs NVRTC, but no GPU and no
    driver. `KVError` with the compiler's words, or naming the package that is missing."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise KVError(f"no kernels for {arch}: cuda-core cannot be imported ({error}); {INSTALL}") from None
    options = ProgramOptions(name=KERNELS.name, arch=arch, std="c++17", include_path=[str(KERNELS.parent)])
    with _errors_named(f"NVRTC does not compile {KERNELS} for {arch}"):
        return Program(KERNELS.read_text("utf-8"), "c++", options).compile("cubin")


class DeviceCache:
    """The KV tensors of one rank on GPU ``device``: one array a layer, indexed [block, head, …], each page contiguous.

    ``follow`` gives the handle of the stream whose work comes before a move (0: CUDA's default stream), asked at each.
    ``way`` fixes how pages move; without it their size and the extents' memory decide. ``ValueError`` as of
    `libra.native.pages.PagedCache`; moves raise `KVError` if there is no GPU or it fails.
    """

    def __init__(
        self,
        layers: Sequence[DeviceArray],
        device: int = 0,
        follow: Callable[[], int] = lambda: 0,
        way: Way | None = None,
    ) -> None:
        described = [layer.__cuda_array_interface__ for layer in layers]
        self.grid = PageGrid.of([_shape_of(interface) for interface in described])
        self.layers = tuple(layers)
        self.addresses = np.array([interface["data"][0] for interface in described], np.uint64)
        self.way = way
        self._device, self._follow = device, follow

    def gather(
        self, blocks: NDArray[np.int64], extents: NDArray[np.uint8], table: NDArray[np.uint32], threads: int = 0
    ) -> int:
        """As `libra.native.pages.gather_pages`; ``threads`` are the CPU's and are not used."""
        return self._move(PageJob.checked(self.grid, self.addresses, blocks, extents, table, True))

    def scatter(
        self, blocks: NDArray[np.int64], extents: NDArray[np.uint8], table: NDArray[np.uint32], threads: int = 0
    ) -> int:
        """As `libra.native.pages.scatter_pages`; ``threads`` are the CPU's and are not used."""
        return self._move(PageJob.checked(self.grid, self.addresses, blocks, extents, table, False))

    def _move(self, job: PageJob) -> int:
        if job.nbytes:
            _mover(self._device, job.to_extents).move(job, self.way, self._follow())
        return job.nbytes


class Mover:
    """A stream of one GPU with the kernels loaded. One move at a time; for any thread."""

    def __init__(self, device: int) -> None:
        why_not, runtime = unavailable(), cuda_runtime()[0]
        if runtime is None or why_not is not None:
            raise KVError(f"KV on GPU {device} cannot be moved: {why_not}")
        from cuda.core import Device

        self._runtime = runtime
        with _errors_named(f"GPU {device} cannot be used"):
            self._device = Device(device)
            self._device.set_current()
            self._stream = self._device.create_stream()
        self._handle = int(self._stream.handle)
        self._event = self._call("cudaEventCreateWithFlags", self._runtime.cudaEventDisableTiming)
        code = compile_kernels(f"sm_{self._device.arch}")
        with _errors_named(f"GPU {device} does not load the kernels for its sm_{self._device.arch}"):
            self._kernels = {16: code.get_kernel("move_16"), 1: code.get_kernel("move_1")}
        self._scratch, self._scratch_bytes = 0, 0
        self._lock = threading.Lock()

    def move(self, job: PageJob, way: Way | None, follow: int) -> None:
        """Carry ``job`` out after the work that stream ``follow`` has now. The calling thread's device becomes this
        one."""
        with self._lock:
            self._device.set_current()
            extents = self._device_address(job)
            if way is None:
                way = "copies" if extents is None or job.grid.page_bytes >= COPIES_FROM else "kernel"
            self._call("cudaEventRecord", self._event, follow)
            self._call("cudaStreamWaitEvent", self._handle, self._event, 0)
            if way == "copies":
                self._copy(job)
            elif extents is not None:
                self._launch(job, extents)
            else:
                raise KVError(
                    f"extents at {job.extents:#x} are not registered with CUDA: call pin() on their arena first"
                )
            self._call("cudaStreamSynchronize", self._handle)

    def _launch(self, job: PageJob, extents: int) -> None:
        from cuda.core import LaunchConfig, launch

        words = job.words()
        sent = self._room(words.nbytes)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", sent, words.ctypes.data, words.nbytes, kind, self._handle)
        kernel = self._kernels[job.word_bytes(extents)]
        with _errors_named(f"GPU {self._device.device_id} does not run the kernel on {job.pages} pages"):
            launch(self._stream, LaunchConfig(grid=GRID, block=BLOCK), kernel, sent, extents, int(job.to_extents))

    def _copy(self, job: PageJob) -> None:
        runtime = self._runtime
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        attributes.flags = runtime.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute
        targets, sources = (addresses.tolist() for addresses in job.copies())
        sizes = [job.grid.page_bytes] * job.pages
        self._call("cudaMemcpyBatchAsync", targets, sources, sizes, job.pages, [attributes], [0], 1, self._handle)

    def _device_address(self, job: PageJob) -> int | None:
        """Where the GPU sees the extents; None if they are not registered."""
        attributes = self._call("cudaPointerGetAttributes", job.extents)
        if attributes.type != self._runtime.cudaMemoryType.cudaMemoryTypeHost:
            return None
        return int(attributes.devicePointer) or None

    def _room(self, nbytes: int) -> int:
        """Memory on the device for the words of a job."""
        if nbytes > self._scratch_bytes:
            size = max(1 << 16, 1 << (nbytes - 1).bit_length())
            if self._scratch:
                self._call("cudaFree", self._scratch)
                self._scratch, self._scratch_bytes = 0, 0
            self._scratch = int(self._call("cudaMalloc", size))
            self._scratch_bytes = size
        return self._scratch

    def _call(self, name: str, *arguments: Any) -> Any:
        """A function of the CUDA runtime; its result. `KVError` with CUDA's words if it fails."""
        error, *results = getattr(self._runtime, name)(*arguments)
        if error != self._runtime.cudaError_t.cudaSuccess:
            raise KVError(f"{name} failed on GPU {self._device.device_id}: {cuda_error(self._runtime, error)}")
        return results[0] if results else None


@cache
def _mover(device: int, to_extents: bool) -> Mover:
    """One for each direction: what is loaded in a step shall not wait for what is saved beside it."""
    return Mover(device)


@contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """Errors of ``cuda.core``, whose class is not public, as a `KVError` that says ``what`` failed."""
    try:
        yield
    except Exception as error:
        raise KVError(f"{what}: {error}") from error


def _shape_of(interface: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    """(shape, strides in bytes, type, bytes of an element)."""
    address, read_only = interface["data"]
    shape, kind = tuple(interface["shape"]), str(interface["typestr"])
    if read_only:
        raise ValueError(f"the array at {address:#x} is read-only: KV is loaded into it")
    item = np.dtype(kind).itemsize
    strides = interface.get("strides")
    if strides is None:
        strides = tuple(item * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    return shape, tuple(strides), kind, item
