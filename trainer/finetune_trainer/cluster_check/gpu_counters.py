"""Reads error counters and utilization of a GPU through NVML, the library of `nvidia-smi`."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml
import torch


@dataclass(frozen=True)
class GpuCounters:
    """Counters of one GPU; None if the GPU or the driver does not provide the value."""

    uncorrected_errors: int | None = None  # uncorrected ECC errors since the driver was loaded
    has_failed_remapping: bool | None = None  # a defective row of memory could not be replaced
    utilization: float | None = None  # share of the last sample period in which a kernel ran, 0 to 1


class NvmlGpu:
    """One GPU of this process, found in NVML by its uuid; all counters are None without NVML."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        if device.type == "cuda":
            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def read_counters(self) -> GpuCounters:
        """Read the error counters and the utilization."""
        kinds = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        remapped = self._read(pynvml.nvmlDeviceGetRemappedRows)
        return GpuCounters(
            self._read(pynvml.nvmlDeviceGetTotalEccErrors, *kinds),
            None if remapped is None else bool(remapped[3]),
            self.read_utilization(),
        )

    def read_utilization(self) -> float | None:
        """Return the utilization, 0 to 1; None if it is unknown."""
        rates = self._read(pynvml.nvmlDeviceGetUtilizationRates)
        return None if rates is None else float(rates.gpu) / 100

    def _read(self, read: Callable[..., Any], *arguments: object) -> Any:
        if self._handle is None:
            return None
        try:
            return read(self._handle, *arguments)
        except pynvml.NVMLError:  # not supported by this GPU, as ECC on consumer cards
            return None
