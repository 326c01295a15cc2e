"""Tests of reading the used memory of GPUs, with a fake NVML."""

import ctypes
from typing import Any

import pytest

from finetune_supervisor.command_checks.gpu_memory import GpuMemoryReader

GIB = 1 << 30


class FakeNvml:
    """NVML functions with the signatures of its API reference; handles are the indices plus 1."""

    def __init__(self, used: list[int], *, failing: str = "", missing: str = "") -> None:
        self._used = used
        self._failing = failing
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        if name == self._failing:
            return lambda *_: 15  # NVML_ERROR_GPU_IS_LOST
        return {
            "nvmlInit_v2": lambda: 0,
            "nvmlDeviceGetCount_v2": self._get_count,
            "nvmlDeviceGetHandleByIndex_v2": self._get_handle,
            "nvmlDeviceGetMemoryInfo": self._get_memory,
        }[name]

    def _get_count(self, count: Any) -> int:
        count._obj.value = len(self._used)
        return 0

    def _get_handle(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def _get_memory(self, handle: ctypes.c_void_p, memory: Any) -> int:
        assert handle.value is not None
        memory._obj.used = self._used[handle.value - 1]
        memory._obj.total = 80 * GIB
        return 0


def load_fake(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: nvml)


def test_used_memory_of_each_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    load_fake(monkeypatch, FakeNvml([40 * GIB, 3, 0]))

    assert GpuMemoryReader().read_used_bytes() == (40 * GIB, 3, 0)


def test_without_the_library_there_are_no_gpus() -> None:
    assert GpuMemoryReader("libnone.so.1").read_used_bytes() == ()


@pytest.mark.parametrize(
    "name", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo"]
)
@pytest.mark.parametrize("problem", ["failing", "missing"])
def test_a_failing_or_missing_function_means_unknown(monkeypatch: pytest.MonkeyPatch, name: str, problem: str) -> None:
    load_fake(monkeypatch, FakeNvml([40 * GIB], **{problem: name}))

    assert GpuMemoryReader().read_used_bytes() == ()
