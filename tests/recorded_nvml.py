"""NVML's answers on machines that a test machine is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class RecordedNVML:
    """Answers as NVML gives them on a machine with these GPUs: (name, MiB, MIG mode or None, NVLink domain)."""

    class NVMLError(Exception):
        pass

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def __init__(self, gpus: list[tuple[str, int, int | None, int]], driver: bool = True) -> None:
        self.gpus, self.driver, self.open = gpus, driver, False

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.gpus[handle][0].encode()

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle:08x}-0000"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=self.gpus[handle][1] * 2**20)

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        mode = self.gpus[handle][2]
        if mode is None:
            raise self.NVMLError("Not Supported")
        return mode, mode

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, caps: int) -> int:
        return 0 if self.gpus[one][3] == self.gpus[other][3] else 5
