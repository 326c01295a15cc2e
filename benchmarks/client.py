"""Measures the installed size of the command line with the Python client, and the time until it responds."""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 15
COMMANDS = {
    "finetune --help": ("-m", "finetune_cli", "--help"),
    "finetune logs --help": ("-m", "finetune_cli", "logs", "--help"),
    "import finetune_client": ("-c", "import finetune_client"),
    "from finetune_client import Client": ("-c", "from finetune_client import Client"),
    "python -c pass": ("-c", "pass"),
}


def main() -> int:
    """Install the command line in a new environment, and print its size and the times."""
    with tempfile.TemporaryDirectory() as folder:
        python = install(Path(folder) / "venv")
        packages = next((Path(folder) / "venv" / "lib").glob("python*/site-packages"))
        total = measure_bytes(packages)
        print(f"installed: {total / 1e6:.1f} MB, without bytecode")
        for name, size in list_largest(packages):
            print(f"  {size / 1e6:5.1f} MB  {name}")
        for title, arguments in COMMANDS.items():
            print(f"{title}: {describe_times(measure_times(python, arguments))}")
    return 0


def install(folder: Path) -> Path:
    """Create an environment with the locked packages and this project, and return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    subprocess.run([*pip, "--require-hashes", "-r", str(ROOT / "requirements" / "hatchling.txt")], check=True)
    build_packages = set(list_packages(folder))
    subprocess.run([*pip, "--require-hashes", "-r", str(ROOT / "requirements" / "cli.txt")], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", str(ROOT)], check=True)
    needed = (ROOT / "requirements" / "cli.txt").read_text()
    for package in build_packages:  # pip and the build backend are not part of the command line
        if f"\n{package.name.split('-')[0].replace('_', '-')}==" not in needed:
            shutil.rmtree(package) if package.is_dir() else package.unlink()
    return python


def list_packages(folder: Path) -> list[Path]:
    """Return the entries of the folder of installed packages."""
    return [path for packages in folder.glob("lib/python*/site-packages") for path in packages.iterdir()]


def measure_bytes(folder: Path) -> int:
    """Return the size of all files below a folder without bytecode."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")


def list_largest(packages: Path, *, number: int = 8) -> list[tuple[str, int]]:
    """Return the largest installed packages with their size in bytes."""
    sizes = [(path.name, measure_bytes(path)) for path in packages.iterdir() if path.is_dir()]
    return sorted(sizes, key=lambda entry: -entry[1])[:number]


def measure_times(python: Path, arguments: tuple[str, ...]) -> list[float]:
    """Return the seconds of several runs of a command; the first run, which writes bytecode, is left out."""
    seconds = []
    for _ in range(ROUNDS + 1):
        started_at = time.perf_counter()
        subprocess.run([str(python), *arguments], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - started_at)
    return seconds[1:]


def describe_times(seconds: list[float]) -> str:
    """Return the median with the range."""
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} runs)"


if __name__ == "__main__":
    sys.exit(main())
