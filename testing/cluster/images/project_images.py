"""Build the operator and trainer images with buildah, without a registry, if their sources have changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from local_wheels import TORCH_LOCKS, UnknownWheel, find_wheel_folders, select_torch_lock, verify_local_wheels
from lockfile import read_locks
from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError, run, stage, try_run
from testing.cluster.host.debian_packages import IMAGE_BUILDING, ensure_packages
from testing.cluster.images.apt_settings import (
    read_host_apt_settings,
    read_host_mirrors,
    render_apt_settings,
    select_mirrors,
)
from testing.cluster.images.base_image import SUITE, ensure_root_file_system
from testing.cluster.images.oci import keep_newest_image_uncompressed
from testing.cluster.node.nodes import unmount_below

REPOSITORY = Path(__file__).parents[3]
BUILD_FILES = ("Dockerfile", ".dockerignore", "pyproject.toml")
LOCKS = {
    "operator": ("requirements/operator.txt", "requirements/hatchling.txt"),
    "trainer": tuple(f"requirements/{name}.txt" for name in ("setuptools", "trainer", *TORCH_LOCKS, "hatchling")),
}
CODE = {
    "operator": ("operator/finetune_api", "operator/finetune_operator", "trainer/finetune_supervisor"),
    "trainer": ("operator/finetune_api", "trainer/finetune_supervisor", "trainer/finetune_trainer"),
}
TARGETS = tuple(CODE)
IMAGE_PYTHON = (3, 11)
MAX_STORED_BYTES = 15 << 30
BASE_NAME = "localhost/finetune-base"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "timeout", "default-timeout", "proxy", "retries")


def get_image_name(target: str, *, tag: str = "dev") -> str:
    return f"localhost/finetune-{target}:{tag}"


@dataclass(frozen=True)
class ImageBuilder:
    """Builds images in an image store inside the cache, separate from any store of the host."""

    cache: Cache
    repository: Path = REPOSITORY
    tag: str = "dev"
    torch: str = ""
    """Lock file of torch in the trainer image; empty: chosen by TORCH and local wheels."""

    def build(self, target: str) -> Path:
        """Return the image as an archive or OCI layout, rebuilt only if its content key has changed."""
        with self.cache.hold_lock("images"):
            name = target if self.tag == "dev" else f"{target}-{self.tag}"
            image, key_file = self.cache.images / name, self.cache.images / f"{name}.key"
            key = self.compute_content_key(target)
            if key_file.exists() and key_file.read_text() == key and image.exists():
                return image
            self.cache.images.mkdir(parents=True, exist_ok=True)
            if can_use_buildah():
                self.build_layout(target, image)
            else:
                self.build_with_docker(target, image)
            key_file.write_text(key)
            return image

    def build_with_docker(self, target: str, archive: Path) -> None:
        name = get_image_name(target, tag=self.tag)
        with stage(f"build image {target} with Docker"):
            run(
                "docker",
                "build",
                "--target",
                target,
                "--tag",
                name,
                *build_docker_arguments(os.environ),
                self.repository,
            )
            run("docker", "save", "--output", archive, name)

    def build_layout(self, target: str, layout: Path) -> None:
        """Build the image with buildah and write it as an OCI layout, a folder of blobs."""
        ensure_packages(IMAGE_BUILDING)
        with stage(f"build image {target}"):
            self.build_image(target)
        with stage(f"write image {target}"):
            self.write_layout(target, layout)
        self.prune_image_store()
        unmount_below(self.cache.images)

    def prune_image_store(self) -> None:
        """Empty the image store if it exceeds MAX_STORED_BYTES; this also empties the build cache."""
        layers = json.loads((self.cache.images / "storage" / "overlay-layers" / "layers.json").read_text())
        if sum(layer.get("diff-size", 0) for layer in layers) > MAX_STORED_BYTES:
            with stage("remove old layers of image builds"):
                self.run_buildah("rm", "--all")
                self.run_buildah("rmi", "--prune")

    def compute_content_key(self, target: str) -> str:
        """Return a hash of all source files of the image."""
        key_hash = hashlib.sha256()
        for path in list_source_files(self.repository, target):
            content = path.read_bytes()
            key_hash.update(f"{path.relative_to(self.repository)} {len(content)}\n".encode() + content)
        for folder in find_wheel_folders(REPOSITORY, os.environ):
            key_hash.update(" ".join(sorted(path.name for path in folder.glob("*.whl"))).encode())
        return key_hash.hexdigest()

    def run_buildah(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Run buildah and return its output; copies of layers are written to the cache, not to /var/tmp."""
        images = self.cache.images
        (images / "tmp").mkdir(parents=True, exist_ok=True)
        return run(
            *("buildah", "--root", images / "storage", "--runroot", images / "run", *arguments),
            environment={"TMPDIR": str(images / "tmp")},
            stdin=stdin,
        )

    def ensure_base_image(self, *, with_apt: bool) -> str:
        """Return the name of the base image, imported into the image store once per archive."""
        archive = ensure_root_file_system(self.cache, with_apt=with_apt)
        name = f"{BASE_NAME}:{archive.stem}-{archive.stat().st_mtime_ns}"
        if name not in self.run_buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
            container = self.run_buildah("from", "scratch").strip()
            self.run_buildah("add", "--quiet", container, archive, "/")
            self.run_buildah("config", "--cmd", "python3", container)
            self.run_buildah("commit", "--quiet", "--rm", container, name)
        return name

    def build_image(self, target: str) -> None:
        """Build one target; the host's pip and apt settings are passed as secrets: layers do not depend on them."""
        wheel_folders = find_wheel_folders(REPOSITORY, os.environ)
        torch = self.torch or select_image_torch(wheel_folders)
        base = self.ensure_base_image(with_apt=target == "trainer" and torch == "torch")
        with tempfile.TemporaryDirectory() as scratch, serve_folders(wheel_folders) as find_links:
            secrets = write_secrets(Path(scratch), find_links=find_links)
            self.run_buildah(
                *("build", "--layers", "--pull-never", "--isolation", "chroot", "--network", "host"),
                *(word for name, path in secrets.items() for word in ("--secret", f"id={name},src={path}")),
                *("--build-arg", f"BASE_IMAGE={base}", "--build-arg", f"TORCH={torch}"),
                *("--target", target, "--tag", get_image_name(target, tag=self.tag)),
                self.repository,
            )

    def write_layout(self, target: str, layout: Path) -> None:
        """Push the image into the layout; existing layers are not written again."""
        self.run_buildah(
            *("push", "--quiet", "--compression-level", "1"),
            *(get_image_name(target, tag=self.tag), f"oci:{layout}:{get_image_name(target, tag=self.tag)}"),
        )
        keep_newest_image_uncompressed(layout)


def write_secrets(folder: Path, *, find_links: tuple[str, ...]) -> dict[str, Path]:
    """Write the host's settings of pip and apt, and return the files of all secrets by their names."""
    mirrors = select_mirrors(read_host_mirrors(), suite=SUITE)
    contents = {
        "pip.conf": render_pip_settings(read_host_pip_settings(), find_links=find_links),
        "apt.conf": render_apt_settings(read_host_apt_settings(), has_mirrors=bool(mirrors)),
        "sources.list": "".join(f"{line}\n" for line in mirrors),
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    return {**{name: folder / name for name in contents}, "certificates": CERTIFICATES}


@contextmanager
def serve_folders(folders: tuple[Path, ...]) -> Iterator[tuple[str, ...]]:
    """Serve folders over HTTP and yield their URLs; mounting a folder would add its mount point to a layer."""
    with ExitStack() as servers:
        addresses = []
        for folder in folders:
            handler = partial(QuietFileServer, directory=str(folder))
            server = servers.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.callback(server.shutdown)
            addresses.append(f"http://127.0.0.1:{server.server_port}/")
        yield tuple(addresses)


class QuietFileServer(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (name of the base class)
        """Suppress request logs, because pip reports its downloads."""


def list_source_files(repository: Path, target: str) -> Iterator[Path]:
    yield from (repository / name for name in (*BUILD_FILES, *LOCKS[target]))
    for folder in CODE[target]:
        files = (path for path in (repository / folder).rglob("*") if path.is_file())
        yield from sorted(path for path in files if "__pycache__" not in path.parts)


def can_use_buildah() -> bool:
    """Return whether buildah can be used; it requires root and is installed on demand. Otherwise Docker is used."""
    return os.geteuid() == 0 and bool(shutil.which("buildah") or shutil.which("apt-get"))


def build_docker_arguments(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the Dockerfile's build arguments that are set in the environment."""
    names = [name for name in ("BASE_IMAGE", "PIP_EXTRA_INDEX_URL", "TORCH") if environment.get(name)]
    return tuple(word for name in names for word in ("--build-arg", f"{name}={environment[name]}"))


def select_image_torch(wheel_folders: tuple[Path, ...]) -> str:
    """Return the lock file of torch in the trainer image; without GPU libraries if a folder contains its wheel.

    Raises: HarnessError if a wheel is not in the lock files
    """
    try:
        verify_local_wheels(wheel_folders, read_locks())
        return select_torch_lock(wheel_folders, python=IMAGE_PYTHON, chosen=os.environ.get("TORCH", ""))
    except (UnknownWheel, ValueError) as error:
        raise HarnessError(str(error)) from error


def read_host_pip_settings() -> dict[str, str]:
    """Return the host's package index settings from pip's configuration files and PIP_ variables."""
    config_listing = try_run(sys.executable, "-m", "pip", "config", "list").stdout
    pairs = (line.partition("=") for line in config_listing.splitlines() if "=" in line)
    settings = {key.split(".", 1)[-1]: value.strip("'\"") for key, _, value in pairs}
    return {key: value for key, value in settings.items() if key in PIP_SETTINGS}


def render_pip_settings(settings: dict[str, str], *, find_links: tuple[str, ...]) -> str:
    lines = [f"{key} = {value}" for key, value in sorted(settings.items())]
    if find_links:
        lines.append("find-links =" + "".join(f"\n    {url}" for url in find_links))
    return "\n".join(("[global]", "cert = /run/secrets/certificates", *lines)) + "\n"
