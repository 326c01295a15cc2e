"""Tests of wheels in local folders."""

import hashlib
import platform
from pathlib import Path

import pytest

from local_wheels import UnknownWheel, find_wheel_folders, select_torch_lock, verify_local_wheels
from lockfile import LockedPackage, read_locks

CONTENT = b"wheel"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PACKAGES = (LockedPackage("torch==2.13.0", ("0" * 64,)), LockedPackage("torch==2.13.0+cpu", (DIGEST, "1" * 64)))


def write_wheel(folder: Path, stem: str, content: bytes = CONTENT) -> Path:
    wheel = folder / f"{stem}.whl"
    wheel.write_bytes(content)
    return wheel


@pytest.mark.parametrize(
    ("stem", "content"),
    [
        pytest.param("torch-2.13.0+cpu-cp311-cp311-linux_x86_64", CONTENT, id="locked"),
        pytest.param("torch-2.12.0+cpu-cp311-cp311-linux_x86_64", b"other", id="version that no lock file accepts"),
        pytest.param("numpy-2.0-cp311-cp311-linux_x86_64", b"other", id="package that no lock file contains"),
    ],
)
def test_wheels_that_are_locked_or_unused_are_accepted(tmp_path: Path, stem: str, content: bytes) -> None:
    write_wheel(tmp_path, stem, content)

    verify_local_wheels((tmp_path,), PACKAGES)


def test_changed_wheel_is_rejected_with_file_and_both_hashes(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "torch-2.13.0+cpu-cp311-cp311-linux_x86_64", b"tampered")

    with pytest.raises(UnknownWheel) as error:
        verify_local_wheels((tmp_path,), PACKAGES)

    found = hashlib.sha256(b"tampered").hexdigest()
    assert str(error.value) == (
        f"{wheel}: found sha256 {found}, expected {DIGEST} or {'1' * 64}; delete the file, or, if you trust it,"
        f" add --hash=sha256:{found} to the line torch==2.13.0+cpu in requirements/"
    )


def test_wheel_with_an_unlocked_local_version_is_rejected(tmp_path: Path) -> None:
    write_wheel(tmp_path, "torch-2.13.0+evil-cp311-cp311-linux_x86_64", b"tampered")

    with pytest.raises(UnknownWheel, match=r"torch==2\.13\.0\+evil is in no lock file; delete the file"):
        verify_local_wheels((tmp_path,), PACKAGES)


def test_only_folders_with_wheels_are_used(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    beside, configured, empty = tmp_path / "shared" / "wheels", tmp_path / "my wheels", tmp_path / "empty"
    for folder in (beside, configured, empty):
        folder.mkdir(parents=True)
    write_wheel(beside, "a-1-py3-none-any")
    write_wheel(configured, "b-1-py3-none-any")

    folders = find_wheel_folders(checkout, {"PIP_FIND_LINKS": f"'{configured}' {empty} https://mirror.example/"})

    assert folders == (configured, beside)


def test_torch_without_gpu_libraries_is_selected_if_its_wheel_fits_python(tmp_path: Path) -> None:
    (cpu_torch,) = read_locks(("torch-cpu",))
    write_wheel(tmp_path, f"torch-{cpu_torch.version}-cp311-cp311-manylinux_2_28_{platform.machine()}")

    assert select_torch_lock((tmp_path,), python=(3, 11)) == "torch-cpu"
    assert select_torch_lock((tmp_path,), python=(3, 12)) == "torch"
    assert select_torch_lock((), python=(3, 11)) == "torch"
    assert select_torch_lock((tmp_path,), python=(3, 11), chosen="torch") == "torch"


def test_unknown_lock_of_torch_is_rejected() -> None:
    with pytest.raises(ValueError, match="TORCH: found 'cuda'; set it to one of torch, torch-cpu"):
        select_torch_lock((), python=(3, 11), chosen="cuda")
