"""Check that every locked package of the images and of the client has a wheel for the processors amd64 and arm64.

It uses only the standard library, and needs the package index: `make check-wheels`, and the workflow of releases.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockfile import read_locks

INSTALLATIONS = (("operator",), ("trainer", "torch"), ("cli", "mcp"))
PLATFORMS = {"amd64": "x86_64-manylinux_2_28", "arm64": "aarch64-manylinux_2_28"}
BUILT_FROM_SOURCE = ("deepspeed",)  # has no wheel for any platform; the Dockerfile builds it


def main() -> int:
    """Print the packages without a wheel and return exit code 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", type=Path, default=Path(sys.executable).parent / "uv", help="path of uv")
    uv: Path = parser.parse_args().uv
    problems = list(find_problems(uv))
    print("\n".join(problems) if problems else f"all locked packages have wheels for {', '.join(PLATFORMS)}")
    return 1 if problems else 0


def find_problems(uv: Path) -> Iterator[str]:
    """Yield uv's message for each installation that is impossible on a platform without building packages."""
    with tempfile.TemporaryDirectory() as folder:
        for names in INSTALLATIONS:
            packages = [package for package in read_locks(names) if package.name not in BUILT_FROM_SOURCE]
            lock = Path(folder) / "lock.txt"
            lock.write_text("".join(sorted({package.render() for package in packages})))
            for platform, tags in PLATFORMS.items():
                options = ("--dry-run", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--system-certs")
                target = ("--python-version", "3.11", "--python-platform", tags, "--target", Path(folder) / "target")
                completed = subprocess.run(
                    [uv, "pip", "install", "--quiet", *options, *target, "--requirement", lock],
                    stderr=subprocess.PIPE,
                    text=True,
                    check=False,
                )
                if completed.returncode:
                    yield f"{' and '.join(names)} on {platform}: {' '.join(completed.stderr.split())}"


if __name__ == "__main__":
    sys.exit(main())
