"""Load an image into the containerd of every node."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError, run, try_run
from testing.cluster.host.layout import ClusterLayout, NodeLayout
from testing.cluster.host.versions import ComponentVersions
from testing.cluster.images.oci import stream_missing, write_single_layer_image
from testing.cluster.node.config_files import PAUSE_IMAGE
from testing.cluster.node.nodes import build_ctr_command


def load_into_nodes(cache: Cache, versions: ComponentVersions, layout: ClusterLayout, image: Path) -> None:
    """Load an image into all nodes in parallel; layers that a node already has are not sent."""
    if not image.exists():
        raise HarnessError(f"image archive {image} does not exist")
    with ThreadPoolExecutor(max_workers=len(layout.nodes)) as pool:
        imports = [
            pool.submit(load_into_node, build_ctr_command(cache, versions, node), node, image) for node in layout.nodes
        ]
        for future in imports:
            future.result()


def load_into_node(command: tuple[str, ...], node: NodeLayout, image: Path) -> None:
    """Load an image into one node, with one retry.

    containerd's garbage collector may delete layers of an older image of this name while new layers are
    unpacked on top of them.
    """
    error = import_missing(command, image) and import_missing(command, image)
    if error:
        raise HarnessError(f"{node.name} cannot import {image}: {error[-1000:]}")
    remove_untagged_images(command)


def import_missing(command: tuple[str, ...], image: Path) -> str:
    """Import the blobs missing on the node; return containerd's error message, or an empty string on success."""
    present_digests = frozenset(run(*command, "content", "list", "--quiet").split())
    process = subprocess.Popen(
        (*command, "images", "import", "--local", "-"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        with process.stdin:
            stream_missing(image, process.stdin, present_digests=present_digests)
    except BrokenPipeError:
        pass  # ctr exited early; its stderr is read below
    error = process.stderr.read().decode(errors="replace").strip()
    exit_code = process.wait()
    return error or f"exit {exit_code}" if exit_code else ""


def remove_untagged_images(command: tuple[str, ...]) -> None:
    """Remove untagged images, which remain after their tag moved to a newer image and occupy gigabytes."""
    rows = [line.split() for line in run(*command, "images", "list").splitlines()[1:]]
    targets = {name: target for name, _, target, *_ in rows}
    tagged = {target for name, target in targets.items() if not name.startswith("sha256:")}
    if untagged_names := [name for name, target in targets.items() if target not in tagged]:
        try_run(*command, "images", "remove", *untagged_names)


def build_pause_archive(cache: Cache) -> Path:
    """Return the archive of the pause image, which keeps a pod's namespaces open."""
    archive = cache.images / "pause-1.tar"
    if not archive.exists():
        program = (cache.get_binary_folder("pause", "1") / "pause").read_bytes()
        write_single_layer_image(archive, name=PAUSE_IMAGE, files={"pause": program}, entrypoint=("/pause",))
    return archive
