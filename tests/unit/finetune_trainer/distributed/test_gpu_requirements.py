"""Test the errors for GPUs, drivers and architectures that torch cannot use."""

from pathlib import Path

import pytest

from finetune_trainer.distributed.gpu_requirements import (
    Card,
    TorchBuild,
    check_architecture,
    explain_missing_gpus,
    explain_missing_other_gpus,
    find_expected_gpus,
    is_too_old,
    read_driver_version,
)
from finetune_trainer.errors import DriverMismatch, GpuUnavailable, InvalidSpec, TrainerError

CUDA_13 = TorchBuild("2.13.0+cu130", "13.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"))
CUDA_12 = TorchBuild("2.13.0+cu126", "12.6", ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"))
CPU = TorchBuild("2.13.0+cpu", None)


@pytest.mark.parametrize(
    ("environment", "planned_gpus", "files", "expectation"),
    [
        pytest.param({}, 8, (), "the limits of the pod contain 8 GPUs", id="limits"),
        pytest.param({}, 0, ("nvidia0", "nvidia1"), "/nvidia0 exists", id="device file"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "GPU-5a"}, 0, (), "NVIDIA_VISIBLE_DEVICES is GPU-5a", id="plugin"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "all"}, 0, (), "", id="variable of the image"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "void"}, 0, (), "", id="hidden by the runtime"),
        pytest.param({}, 0, ("nvidiactl",), "", id="no GPU beside the driver"),
        pytest.param({}, 0, (), "", id="CPU"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, 8, ("nvidia0",), "", id="hidden by the user"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "-1"}, 8, ("nvidia0",), "", id="hidden by an invalid index"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0"}, 0, ("nvidia0",), "/nvidia0 exists", id="selected by the user"),
    ],
)
def test_gpus_are_expected_if_the_container_should_have_them(
    tmp_path: Path, environment: dict[str, str], planned_gpus: int, files: tuple[str, ...], expectation: str
) -> None:
    for name in files:
        (tmp_path / name).touch()

    found = find_expected_gpus(environment, planned_gpus=planned_gpus, devices=tmp_path)

    assert found.removeprefix(str(tmp_path)) == expectation


@pytest.mark.parametrize(
    ("build", "driver", "error", "parts"),
    [
        pytest.param(CUDA_13, "570.86.15", DriverMismatch, ("570.86.15", "CUDA 13.0", "driver 580"), id="old driver"),
        pytest.param(CUDA_12, "515.43.04", DriverMismatch, ("515.43.04", "CUDA 12.6", "driver 525"), id="CUDA 12"),
        pytest.param(CUDA_13, "580.65.06", GpuUnavailable, ("580.65.06", "runtimeClassName"), id="new driver"),
        pytest.param(CUDA_13, "", GpuUnavailable, ("no NVIDIA driver", "driver 580"), id="no driver"),
        pytest.param(CPU, "580.65.06", InvalidSpec, ("2.13.0+cpu", "built for CPUs"), id="torch for CPUs"),
    ],
)
def test_error_without_usable_gpus_contains_the_driver_and_the_one_needed(
    build: TorchBuild, driver: str, error: type[TrainerError], parts: tuple[str, ...]
) -> None:
    explained = explain_missing_gpus("/dev/nvidia0 exists", build, driver=driver)

    assert type(explained) is error
    assert [part for part in ("/dev/nvidia0 exists", *parts) if part not in str(explained)] == []


@pytest.mark.parametrize(
    ("driver", "build", "too_old"),
    [
        pytest.param("570.86.15", CUDA_13, True, id="branch of CUDA 12"),
        pytest.param("570.86.15", CUDA_12, False, id="CUDA 12"),
        pytest.param("580.65.06", CUDA_13, False, id="oldest branch"),
        pytest.param("1000.1", CUDA_13, False, id="compared as a number"),
        pytest.param("", CUDA_13, False, id="unknown driver"),
        pytest.param("570.86.15", TorchBuild("3.0", "14.0"), False, id="unknown version of CUDA"),
        pytest.param("570.86.15", CPU, False, id="torch for CPUs"),
    ],
)
def test_drivers_are_compared_with_the_oldest_branch_of_the_cuda_version(
    driver: str, build: TorchBuild, too_old: bool
) -> None:
    assert is_too_old(driver, build) is too_old


@pytest.mark.parametrize(
    ("capability", "build"),
    [
        pytest.param((9, 0), CUDA_13, id="H100"),
        pytest.param((8, 0), CUDA_13, id="A100"),
        pytest.param((8, 9), CUDA_13, id="L40S: code of 8.6"),
        pytest.param((10, 3), CUDA_13, id="B300: code of 10.0"),
        pytest.param((12, 1), CUDA_13, id="GB10: code of 12.0"),
        pytest.param((13, 0), CUDA_13, id="newer than torch: PTX"),
        pytest.param((7, 0), CUDA_12, id="V100 with CUDA 12"),
        pytest.param((7, 0), CPU, id="no list of architectures"),
        pytest.param((9, 0), TorchBuild("2", "13.0", ("sm_90a",)), id="features of this architecture"),
        pytest.param((10, 3), TorchBuild("2", "13.0", ("sm_100f",)), id="features of this family"),
    ],
)
def test_supported_gpus_are_accepted(capability: tuple[int, int], build: TorchBuild) -> None:
    check_architecture(Card("GPU", capability), build, driver="580.65.06")


@pytest.mark.parametrize(
    ("capability", "build"),
    [
        pytest.param((7, 0), CUDA_13, id="V100"),
        pytest.param((6, 1), CUDA_13, id="P40"),
        pytest.param((10, 0), CUDA_12, id="B200 with CUDA 12"),
        pytest.param((8, 0), TorchBuild("2", "13.0", ("sm_86",)), id="older than the code"),
        pytest.param((9, 1), TorchBuild("2", "13.0", ("sm_90a",)), id="features of another architecture"),
        pytest.param((12, 0), TorchBuild("2", "13.0", ("sm_100f",)), id="features of another family"),
    ],
)
def test_gpus_without_code_are_rejected(capability: tuple[int, int], build: TorchBuild) -> None:
    with pytest.raises(DriverMismatch):
        check_architecture(Card("GPU", capability), build, driver="580.65.06")


def test_error_for_an_unsupported_gpu_contains_card_capability_driver_and_remedy() -> None:
    with pytest.raises(
        DriverMismatch,
        match=r"torch 2\.13\.0\+cu130 for CUDA 13\.0 does not support Tesla V100-SXM2-32GB \(compute capability 7\.0,"
        r" driver 580\.65\.06\): it contains code for sm_75, .*nodeSelector.*spec\.image",
    ):
        check_architecture(Card("Tesla V100-SXM2-32GB", (7, 0)), CUDA_13, driver="580.65.06")


def test_driver_version_is_read_from_the_kernel_module(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
    )

    assert read_driver_version(tmp_path / "version") == "580.95.05"
    assert read_driver_version(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("resource", "build", "rocm", "error", "message"),
    [
        pytest.param("amd.com/gpu", CUDA_13, None, InvalidSpec, "is built for CUDA 13.0: set spec.image", id="CUDA"),
        pytest.param("amd.com/gpu", TorchBuild("2", None), None, InvalidSpec, "is built for CPUs", id="CPU"),
        pytest.param("amd.com/gpu", TorchBuild("2", None), "7.1", GpuUnavailable, "no usable GPU", id="ROCm"),
        pytest.param("example.com/gpu", CUDA_13, None, GpuUnavailable, "no usable GPU", id="another vendor"),
    ],
)
def test_missing_gpus_of_another_vendor_are_explained(
    resource: str, build: TorchBuild, rocm: str | None, error: type[TrainerError], message: str
) -> None:
    found = explain_missing_other_gpus(resource, build, rocm=rocm)

    assert type(found) is error
    assert str(found).startswith(f"the limits of the pod contain {resource}, but torch {build.version} ")
    assert message in str(found)
