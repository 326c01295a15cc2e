"""Update constraints.txt, which pins all requirements in pyproject.toml for every platform.

It uses only the standard library, like `environment.py`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from environment import ROOT, UV, build_uv_environment, read_requirements

BUILD_REQUIREMENTS = ("hatchling", "editables")  # build requirements of images and editable installs
HEADER = "# Exact versions of everything the project installs; `make lock` renews it.\n"


def main() -> int:
    """Resolve all versions from the package index, because the wheels next to the checkout have local versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--upgrade", action="store_true", help="use the newest versions instead of keeping compatible ones"
    )
    upgrade = ("--upgrade",) if parser.parse_args().upgrade else ()
    constraints = ROOT / "constraints.txt"
    with tempfile.TemporaryDirectory() as scratch:
        python = Path(scratch) / "venv" / "bin" / "python"
        venv.create(python.parent.parent, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV], check=True)
        resolved = Path(scratch) / "constraints.txt"
        resolved.write_text(constraints.read_text())  # uv keeps existing versions if they are compatible
        options = ["--system-certs", "--universal", "--python-version", "3.11", "--no-header", "--no-annotate"]
        subprocess.run(
            [python.parent / "uv", "pip", "compile", "--quiet", *options, *upgrade, "--output-file", resolved, "-"],
            input="\n".join((*read_requirements(ROOT / "pyproject.toml"), *BUILD_REQUIREMENTS)),
            text=True,
            check=True,
            env=build_uv_environment(os.environ),
        )
        constraints.write_text(HEADER + resolved.read_text())
    print(f"constraints.txt: {len(constraints.read_text().splitlines()) - 1} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
