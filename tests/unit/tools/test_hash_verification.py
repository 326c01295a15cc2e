"""Tests that pip and uv refuse artefacts with another sha256, with a package index on the loopback interface."""

import hashlib
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from environment import Installer, build_uv_environment
from lockfile import LockedPackage

NAME = "example"
Install = Callable[[Path, Path, dict[str, str]], "subprocess.CompletedProcess[str]"]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (name of the base class)
        """Suppress request logs."""


def write_wheel(folder: Path, *, version: str, content: str) -> Path:
    """Write a wheel with one module; the same arguments always give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{NAME}-{version}-py3-none-any.whl"
    info = f"{NAME}-{version}.dist-info"
    files = {
        f"{NAME}.py": f"CONTENT = {content!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), text)
    return wheel


@contextmanager
def serve_index(root: Path) -> Iterator[str]:
    """Serve `root/example` as a package index that gives no hashes, and yield the URL of the index."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def install_with_pip(folder: Path, lock: Path, settings: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    options = ["--isolated", "--disable-pip-version-check", "--no-cache-dir", "--index-url", settings["PIP_INDEX_URL"]]
    options += ["--extra-index-url", settings["PIP_EXTRA_INDEX_URL"]] if "PIP_EXTRA_INDEX_URL" in settings else []
    return subprocess.run(
        [sys.executable, "-m", "pip", "--python", folder, "install", *options, "--require-hashes", "-r", lock],
        capture_output=True,
        text=True,
        check=False,
    )


def install_with_uv(folder: Path, lock: Path, settings: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    installer = Installer(uv=Path(sys.executable).with_name("uv"), cache=folder.parent / "uv-cache")
    return subprocess.run(
        installer.build_command(folder, [lock]),
        env=build_uv_environment(settings),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def locked_wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "original", version="1.0", content="locked")


@pytest.fixture
def lock(tmp_path: Path, locked_wheel: Path) -> Path:
    path = tmp_path / "lock.txt"
    path.write_text(LockedPackage(f"{NAME}==1.0", (hashlib.sha256(locked_wheel.read_bytes()).hexdigest(),)).render())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    venv.create(tmp_path / "venv")
    return tmp_path / "venv"


def list_installed_modules(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.glob(f"lib/*/site-packages/{NAME}.py")]


BOTH = pytest.mark.parametrize(
    "install", [pytest.param(install_with_pip, id="pip"), pytest.param(install_with_uv, id="uv")]
)


@BOTH
def test_locked_artefact_is_installed(tmp_path: Path, lock: Path, folder: Path, install: Install) -> None:
    write_wheel(tmp_path / "index" / NAME, version="1.0", content="locked")
    with serve_index(tmp_path / "index") as url:
        result = install(folder, lock, {"PIP_INDEX_URL": url})

    assert result.returncode == 0, result.stderr
    assert list_installed_modules(folder) == ["CONTENT = 'locked'\n"]


@BOTH
def test_tampered_artefact_is_rejected(tmp_path: Path, lock: Path, folder: Path, install: Install) -> None:
    wheel = write_wheel(tmp_path / "index" / NAME, version="1.0", content="tampered")
    with serve_index(tmp_path / "index") as url:
        result = install(folder, lock, {"PIP_INDEX_URL": url})

    assert result.returncode != 0
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in result.stdout + result.stderr
    assert list_installed_modules(folder) == []


@BOTH
def test_extra_index_cannot_replace_a_locked_version_by_a_local_version(
    tmp_path: Path, lock: Path, folder: Path, install: Install
) -> None:
    write_wheel(tmp_path / "index" / NAME, version="1.0", content="locked")
    write_wheel(tmp_path / "extra" / NAME, version="1.0+evil", content="evil")
    with serve_index(tmp_path / "index") as url, serve_index(tmp_path / "extra") as extra_url:
        result = install(folder, lock, {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": extra_url})

    assert result.returncode != 0
    assert "hash" in (result.stdout + result.stderr).lower()
    assert list_installed_modules(folder) == []


@BOTH
def test_package_without_locked_hash_is_rejected(tmp_path: Path, folder: Path, install: Install) -> None:
    write_wheel(tmp_path / "index" / NAME, version="1.0", content="locked")
    unlocked = tmp_path / "unlocked.txt"
    unlocked.write_text(f"{NAME}==1.0\n")
    with serve_index(tmp_path / "index") as url:
        result = install(folder, unlocked, {"PIP_INDEX_URL": url})

    assert result.returncode != 0
    assert "hash" in (result.stdout + result.stderr).lower()
    assert list_installed_modules(folder) == []
