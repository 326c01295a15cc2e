"""Reads the used memory of this container's GPUs from NVML, the library of `nvidia-smi`, which the driver installs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t of the NVML API reference."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _NvmlError(Exception):
    """A function of NVML is missing or has failed."""


class GpuMemoryReader:
    """Reads the used memory of all visible GPUs; without NVML there are none."""

    def __init__(self, library: str = _LIBRARY) -> None:
        self._nvml: ctypes.CDLL | None = None
        try:
            self._nvml = ctypes.CDLL(library)
            _call(self._nvml, "nvmlInit_v2")
        except (OSError, _NvmlError):
            self._nvml = None

    def read_used_bytes(self) -> tuple[int, ...]:
        """Return the used memory of each GPU in bytes; empty if it cannot be read."""
        if self._nvml is None:
            return ()
        count = ctypes.c_uint()
        try:
            _call(self._nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
            return tuple(_read_used_bytes(self._nvml, index) for index in range(count.value))
        except _NvmlError:  # for example because a GPU has failed
            return ()


def _read_used_bytes(nvml: ctypes.CDLL, index: int) -> int:
    device, memory = ctypes.c_void_p(), _Memory()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
    _call(nvml, "nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
    return int(memory.used)


def _call(nvml: ctypes.CDLL, name: str, *arguments: object) -> None:
    try:
        function: Callable[..., int] = getattr(nvml, name)
    except AttributeError as error:
        raise _NvmlError(name) from error
    if code := function(*arguments):
        raise _NvmlError(f"{name} returned {code}")
