"""Build the trainer image with torch for CUDA in an image store of its own, and run programs in it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lockfile import read_locks
from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError, stage, try_run
from testing.cluster.host.debian_packages import IMAGE_BUILDING, ensure_packages
from testing.cluster.images.project_images import ImageBuilder, can_use_buildah, get_image_name
from testing.cluster.node.nodes import unmount_below

REQUIRED_BYTES = 24 << 30  # the packages and three copies of them while buildah commits their layer, 5.7 GB each
USER = "1000:1000"


@dataclass(frozen=True)
class CudaImage:
    """A container of the image, in which programs run as the user of the image."""

    builder: ImageBuilder
    container: str
    size: str
    """Size of the image without compression, such as "6.05 GB"."""

    def run_python(self, source: str) -> str:
        """Run Python source in the container and return its standard output."""
        options = ("--isolation", "chroot", "--user", USER)
        return self.builder.run_buildah("run", *options, self.container, "--", "python", "-", stdin=source)


def explain_missing_requirement() -> str:
    """Return why this host cannot build the image; empty if it can."""
    if not can_use_buildah():
        return "building the image needs root and buildah, or apt-get to install it"
    (torch,) = (package for package in read_locks(("torch",)) if package.name == "torch")
    index = try_run(sys.executable, "-m", "pip", "index", "versions", "torch")
    if torch.version not in index.stdout:
        return f"the package index has no torch {torch.version} for CUDA: {index.stderr.strip()[-300:]}"
    return ""


@contextmanager
def build_cuda_image(cache: Cache) -> Iterator[CudaImage]:
    """Build the image from the locked packages, and remove its layers afterwards, because they are large.

    Raises: HarnessError if the file system has too little free space, or if the build fails
    """
    ensure_packages(IMAGE_BUILDING)
    builder = ImageBuilder(Cache(cache.root / "cuda-image"), torch="torch")
    with cache.hold_lock("cuda-image"):
        remove_layers(builder)  # of a build that was killed
        check_free_space(builder)
        try:
            with stage("build the trainer image with torch for CUDA"):
                builder.build_image("trainer")
            name = get_image_name("trainer")
            size = builder.run_buildah("images", "--format", "{{.Size}}", name).strip()
            yield CudaImage(builder, builder.run_buildah("from", name).strip(), size)
        finally:
            remove_layers(builder)


def check_free_space(builder: ImageBuilder) -> None:
    folder = builder.cache.images
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < REQUIRED_BYTES:
        raise HarnessError(
            f"{folder} has {free_bytes / 2**30:.1f} GiB of free space, but building the image needs"
            f" {REQUIRED_BYTES >> 30} GiB: free space, or set FINETUNE_CACHE to a folder of another file system"
        )


def remove_layers(builder: ImageBuilder) -> None:
    """Remove the image store and copies of its layers, but not the archive of the base image."""
    unmount_below(builder.cache.images)
    for name in ("storage", "run", "tmp"):
        shutil.rmtree(builder.cache.images / name, ignore_errors=True)
