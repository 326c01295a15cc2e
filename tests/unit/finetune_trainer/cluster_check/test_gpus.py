"""Test the check that a device computes correctly."""

import pytest
import torch

from finetune_trainer.cluster_check.gpu_counters import GpuCounters, NvmlGpu
from finetune_trainer.cluster_check.gpus import check_device, count_wrong_products
from finetune_trainer.errors import GpuHardware

CPU = torch.device("cpu")


def test_device_that_computes_correctly_passes() -> None:
    check_device(CPU, GpuCounters())

    assert count_wrong_products(CPU) == 0


def test_wrong_elements_of_the_product_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.Tensor.__matmul__

    def multiply_with_a_fault(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        product[3, 7:9] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply_with_a_fault)

    assert count_wrong_products(CPU) == 2
    with pytest.raises(GpuHardware, match="cpu computes 2 elements of a matrix product incorrectly; drain"):
        check_device(CPU, GpuCounters())


@pytest.mark.parametrize(
    ("counters", "message"),
    [
        pytest.param(GpuCounters(uncorrected_errors=3), "3 uncorrectable memory errors", id="ECC errors"),
        pytest.param(GpuCounters(has_failed_remapping=True), "could not replace defective rows", id="failed remapping"),
    ],
)
def test_memory_errors_fail_the_check(counters: GpuCounters, message: str) -> None:
    with pytest.raises(GpuHardware, match=message):
        check_device(CPU, counters)


def test_cpu_has_no_counters() -> None:
    assert NvmlGpu(CPU).read_counters() == GpuCounters(None, None, None)
