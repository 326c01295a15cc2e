"""Building the project's two images with buildah, without a registry, and only when something changed."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
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

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import attempt, run, stage
from testing.cluster.host.debian_packages import IMAGE_BUILDING, ensure_packages
from testing.cluster.images.base_image import ensure_root_file_system
from testing.cluster.images.oci import keep_newest_image_uncompressed
from testing.cluster.node.nodes import unmount_below

REPOSITORY = Path(__file__).parents[3]
BUILD_FILES = ("Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt")
CODE = {
    "operator": ("operator/finetune_api", "operator/finetune_operator", "trainer/finetune_supervisor"),
    "trainer": ("operator/finetune_api", "trainer/finetune_trainer", "trainer/finetune_supervisor"),
}
TARGETS = tuple(CODE)
MOST_STORED_BYTES = 15 << 30
BASE_NAME = "localhost/finetune-base"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "timeout", "default-timeout", "proxy", "retries")


def image_name(target: str) -> str:
    return f"localhost/finetune-{target}:dev"


@dataclass(frozen=True)
class ImageBuilder:
    """Its image store is in the cache, apart from any that the machine has already."""

    cache: Cache
    repository: Path = REPOSITORY

    def build(self, target: str) -> Path:
        """The image, as something that can be loaded; a second call without a change takes no time."""
        with self.cache.locked("images"):
            image, key_file = self.cache.images / target, self.cache.images / f"{target}.key"
            key = self.content_key(target)
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
        name = image_name(target)
        with stage(f"build image {target} with Docker"):
            run("docker", "build", "--target", target, "--tag", name, *docker_arguments(os.environ), self.repository)
            run("docker", "save", "--output", archive, name)

    def build_layout(self, target: str, layout: Path) -> None:
        """An OCI layout: a folder of blobs."""
        ensure_packages(IMAGE_BUILDING)
        with stage(f"build image {target}"):
            self.build_image(target, base=self.ensure_base())
        with stage(f"write image {target}"):
            self.write_layout(target, layout)
        self.prune()
        unmount_below(self.cache.images)

    def prune(self) -> None:
        """Begin anew when superseded layers take too much: what is removed is also what makes builds short."""
        layers = json.loads((self.cache.images / "storage" / "overlay-layers" / "layers.json").read_text())
        if sum(layer.get("diff-size", 0) for layer in layers) > MOST_STORED_BYTES:
            with stage("remove old layers of image builds"):
                self.buildah("rm", "--all")
                self.buildah("rmi", "--prune")

    def content_key(self, target: str) -> str:
        """A hash of all that goes into the image."""
        hashed = hashlib.sha256()
        for path in source_files(self.repository, target):
            content = path.read_bytes()
            hashed.update(f"{path.relative_to(self.repository)} {len(content)}\n".encode() + content)
        for folder in wheel_folders(self.repository):
            hashed.update(" ".join(sorted(path.name for path in folder.glob("*.whl"))).encode())
        return hashed.hexdigest()

    def buildah(self, *arguments: str | Path) -> str:
        storage = self.cache.images
        return run("buildah", "--root", storage / "storage", "--runroot", storage / "run", *arguments)

    def ensure_base(self) -> str:
        """The name of the base image, imported into the builder's store once per archive."""
        archive = ensure_root_file_system(self.cache)
        name = f"{BASE_NAME}:{archive.stem}-{archive.stat().st_mtime_ns}"
        if name not in self.buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
            container = self.buildah("from", "scratch").strip()
            self.buildah("add", "--quiet", container, archive, "/")
            self.buildah("config", "--cmd", "python3", container)
            self.buildah("commit", "--quiet", "--rm", container, name)
        return name

    def build_image(self, target: str, *, base: str) -> None:
        """Settings of this machine come in as secrets: no layer keeps them, and no layer is renewed for them."""
        with tempfile.TemporaryDirectory() as scratch, serving(wheel_folders(self.repository)) as find_links:
            settings = Path(scratch) / "pip.conf"
            settings.write_text(render_pip_settings(host_pip_settings(), find_links=find_links))
            self.buildah(
                *("build", "--layers", "--pull-never", "--isolation", "chroot", "--network", "host"),
                *("--secret", f"id=pip.conf,src={settings}", "--secret", f"id=certificates,src={CERTIFICATES}"),
                *("--build-arg", f"BASE_IMAGE={base}", "--target", target, "--tag", image_name(target)),
                self.repository,
            )

    def write_layout(self, target: str, layout: Path) -> None:
        """Only layers that the layout lacks are written."""
        self.buildah(
            *("push", "--quiet", "--compression-level", "1"),
            *(image_name(target), f"oci:{layout}:{image_name(target)}"),
        )
        keep_newest_image_uncompressed(layout)


@contextmanager
def serving(folders: tuple[Path, ...]) -> Iterator[tuple[str, ...]]:
    """Addresses under which a build finds the folders: a mounted folder would leave its mount point in a layer."""
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
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name it has in the base class)
        """Say nothing: pip reports what it takes."""


def source_files(repository: Path, target: str) -> Iterator[Path]:
    yield from (repository / name for name in BUILD_FILES)
    for folder in CODE[target]:
        files = (path for path in (repository / folder).rglob("*") if path.is_file())
        yield from sorted(path for path in files if "__pycache__" not in path.parts)


def can_use_buildah() -> bool:
    """It needs root, and is installed when it is missing; Docker is for everybody else."""
    return os.geteuid() == 0 and bool(shutil.which("buildah") or shutil.which("apt-get"))


def docker_arguments(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Build arguments that the Dockerfile knows, where the environment sets them."""
    names = [name for name in ("BASE_IMAGE", "PIP_EXTRA_INDEX_URL") if environment.get(name)]
    return tuple(word for name in names for word in ("--build-arg", f"{name}={environment[name]}"))


def wheel_folders(repository: Path) -> tuple[Path, ...]:
    """Folders of wheels to prefer, such as one that holds torch for CPUs."""
    named = [Path(word) for word in shlex.split(os.environ.get("PIP_FIND_LINKS", "")) if Path(word).is_dir()]
    folders = (*named, (repository.parent / "shared" / "wheels"))
    return tuple(folder for folder in folders if any(folder.glob("*.whl")))


def host_pip_settings() -> dict[str, str]:
    """What this machine says about where packages come from: pip's configuration files and PIP_ variables."""
    listed = attempt(sys.executable, "-m", "pip", "config", "list").stdout
    pairs = (line.partition("=") for line in listed.splitlines() if "=" in line)
    found = {key.split(".", 1)[-1]: value.strip("'\"") for key, _, value in pairs}
    return {key: value for key, value in found.items() if key in PIP_SETTINGS}


def render_pip_settings(settings: dict[str, str], *, find_links: tuple[str, ...]) -> str:
    lines = [f"{key} = {value}" for key, value in sorted(settings.items())]
    if find_links:
        lines.append("find-links =" + "".join(f"\n    {place}" for place in find_links))
    return "\n".join(("[global]", "cert = /run/secrets/certificates", *lines)) + "\n"
