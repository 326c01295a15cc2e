"""Entry point of `make gpu-check-wheels`, which downloads the wheels for a machine with Python 3.12 and PyTorch.

The versions are those of the lock files, and every download is compared with its locked sha256.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from benchmarks.gpu_check.wheel_folder import WheelFolderRejected, check_wheel_folder
from benchmarks.gpu_check.wheels.bitsandbytes import reduce_wheel
from benchmarks.gpu_check.wheels.packages import (
    MACHINE_PACKAGES,
    PYTHON_VERSION,
    find_missing_packages,
    find_unmet_requirements,
    read_machine_packages,
    select_packages,
)
from lockfile import LockedPackage

BUILT_FROM_SOURCE = "deepspeed"  # published without a wheel
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64"]


def main(arguments: Sequence[str]) -> int:
    """Download and check the wheels. Return 1 if a requirement is not met or the folder is too large."""
    parser = argparse.ArgumentParser(prog="gpu-check-wheels", description="Download the wheels for `make gpu-check`.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cuda", default="130", help="CUDA version of the machine's torch without point (default 130)")
    parser.add_argument("--machine-packages", type=Path, default=MACHINE_PACKAGES, help="output of pip freeze there")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for wheel in options.folder.glob("*.whl"):
        wheel.unlink()
    for package in select_packages():
        download(package, options.folder)
    (bitsandbytes,) = options.folder.glob("bitsandbytes-*.whl")
    reduce_wheel(bitsandbytes, cuda=options.cuda)
    machine = read_machine_packages(options.machine_packages)
    unmet = [find(options.folder.glob("*.whl"), machine) for find in (find_missing_packages, find_unmet_requirements)]
    for requirement in chain(*unmet):
        print(requirement)
    try:
        wheels = check_wheel_folder(options.folder)
    except WheelFolderRejected as error:
        print(error, file=sys.stderr)
        return 1
    for wheel in sorted(wheels, key=lambda wheel: -wheel.stat().st_size):
        print(f"{wheel.stat().st_size / 1e6:7.2f} MB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 1e6:7.2f} MB in {options.folder}")
    return 1 if any(unmet) else 0


def download(package: LockedPackage, folder: Path) -> None:
    """Download the wheel of a package, or build it. Raises: SystemExit if its sha256 is not in the lock file."""
    before = set(folder.iterdir())
    requirement = f"{package.name}=={package.version}"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--dest", str(folder)]
    if package.name == BUILT_FROM_SOURCE:
        options += ["--no-binary", package.name, "--no-build-isolation"]
    else:
        options += ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON_VERSION]
        options += [word for platform in PLATFORMS for word in ("--platform", platform)]
    run_pip("download", *options, requirement)
    (artefact,) = set(folder.iterdir()) - before
    if hashlib.sha256(artefact.read_bytes()).hexdigest() not in package.hashes:
        raise SystemExit(f"{artefact.name}: its sha256 is not in the lock files of {requirement}")
    if package.name == BUILT_FROM_SOURCE:
        build_options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
        run_pip("wheel", *build_options, "--wheel-dir", str(folder), str(artefact))
        artefact.unlink()


def run_pip(*arguments: str) -> None:
    environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ENABLE_NINJA": "0"}
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
