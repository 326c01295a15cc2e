"""Bringing an image into every node's containerd."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import ClusterError, attempt, run
from testing.cluster.host.layout import Layout, NodeLayout
from testing.cluster.host.versions import Versions
from testing.cluster.images.oci import stream_missing, write_single_layer_image
from testing.cluster.node.config_files import PAUSE_IMAGE
from testing.cluster.node.nodes import ctr


def load_into_nodes(cache: Cache, versions: Versions, layout: Layout, image: Path) -> None:
    """All nodes at once; of an image that a node has in part, only the new layers are sent and unpacked."""
    if not image.exists():
        raise ClusterError(f"image archive {image} does not exist")
    with ThreadPoolExecutor(max_workers=len(layout.nodes)) as pool:
        imports = [pool.submit(load_into_node, ctr(cache, versions, node), node, image) for node in layout.nodes]
        for done in imports:
            done.result()


def load_into_node(command: tuple[str, ...], node: NodeLayout, image: Path) -> None:
    """Twice if need be: what an older image of this name shared may be collected while new layers are put upon it."""
    said = import_missing(command, image) and import_missing(command, image)
    if said:
        raise ClusterError(f"{node.name} cannot import {image}: {said[-1000:]}")
    forget_replaced_images(command)


def import_missing(command: tuple[str, ...], image: Path) -> str:
    """What containerd says against it; empty when it took the image."""
    present = frozenset(run(*command, "content", "list", "--quiet").split())
    importing = subprocess.Popen(
        (*command, "images", "import", "--local", "-"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert importing.stdin is not None
    assert importing.stderr is not None
    try:
        with importing.stdin:
            stream_missing(image, importing.stdin, present=present)
    except BrokenPipeError:
        pass  # the reader has ended, and says why below
    said = importing.stderr.read().decode(errors="replace").strip()
    code = importing.wait()
    return said or f"exit {code}" if code else ""


def forget_replaced_images(command: tuple[str, ...]) -> None:
    """Kubernetes gives every image a second name, its id, which would hold gigabytes when the tag has moved on."""
    rows = [line.split() for line in run(*command, "images", "list").splitlines()[1:]]
    targets = {name: target for name, _, target, *_ in rows}
    tagged = {target for name, target in targets.items() if not name.startswith("sha256:")}
    if replaced := [name for name, target in targets.items() if target not in tagged]:
        attempt(*command, "images", "remove", *replaced)


def pause_archive(cache: Cache) -> Path:
    """The image of the container that holds a pod's namespaces: one small program, built with the others."""
    archive = cache.images / "pause-1.tar"
    if not archive.exists():
        program = (cache.binaries("pause", "1") / "pause").read_bytes()
        write_single_layer_image(archive, name=PAUSE_IMAGE, files={"pause": program}, entrypoint=("/pause",))
    return archive
