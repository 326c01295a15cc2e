"""Tests of the wheels for `make gpu-check`: selection, versions and reduction."""

from pathlib import Path
from zipfile import ZipFile

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.wheel_folder import install_wheels
from benchmarks.gpu_check.wheels.bitsandbytes import reduce_wheel
from benchmarks.gpu_check.wheels.packages import find_missing_packages, read_machine_packages, select_packages


def write_wheel(folder: Path, name: str, *, requires: str = "", files: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )
    contents = {
        f"{name}/__init__.py": "",
        **(files or {}),
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for path, content in contents.items():
            archive.writestr(path, content)
    return wheel


def test_gpu_check_ends_with_2_if_the_wheels_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--small", "--wheels", str(tmp_path), "--results", str(tmp_path / "results")]) == 2
    assert "contains no wheels" in capsys.readouterr().err


def test_every_package_that_the_project_requires_is_in_the_folder_or_on_the_machine(tmp_path: Path) -> None:
    wheels = [write_wheel(tmp_path, package.name) for package in select_packages()]
    machine = read_machine_packages()
    assert find_missing_packages(wheels, machine) == []

    (nvml,) = (wheel for wheel in wheels if wheel.name.startswith("nvidia-ml-py"))
    wheels.remove(nvml)
    del machine["pillow"]

    assert [requirement.requirement for requirement in find_missing_packages(wheels, machine)] == [
        "pillow>=12",
        "nvidia-ml-py>=13.590",
    ]


def test_versions_are_those_of_the_trainer() -> None:
    """The environment of another trainer is locked in the same folder, with another version of transformers."""
    packages = {package.name: package.version for package in select_packages()}

    locked = (Path(__file__).parents[3] / "requirements/trainer.txt").read_text()
    for name in ("transformers", "peft", "pydantic", "deepspeed", "bitsandbytes", "httpx2"):
        assert f"{name}=={packages[name]} " in locked


def test_bitsandbytes_keeps_the_libraries_of_one_cuda_version(tmp_path: Path) -> None:
    names = ("cuda126", "cuda130", "cpu", "rocm72")
    files = {f"bitsandbytes/libbitsandbytes_{name}.so": name for name in names}
    wheel = write_wheel(tmp_path, "bitsandbytes", files=files)

    reduce_wheel(wheel, cuda="130")

    with ZipFile(wheel) as archive:
        kept = {name.partition("_")[2] for name in archive.namelist() if name.endswith(".so")}
    assert kept == {"cuda130.so", "cpu.so"}
    install_wheels(tmp_path, tmp_path / "site")  # pip verifies the list of files
    assert (tmp_path / "site/bitsandbytes/libbitsandbytes_cuda130.so").read_text() == "cuda130"
    with pytest.raises(ValueError, match="no library for CUDA 124, only for 130"):
        reduce_wheel(wheel, cuda="124")
