"""OCI image archives: writing a tiny one, and streaming one without the parts that the reader has."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO

NAME_ANNOTATION = "io.containerd.image.name"
BLOBS = "blobs/sha256/"


def write_single_layer_image(
    archive: Path, *, name: str, files: Mapping[str, bytes], entrypoint: tuple[str, ...]
) -> None:
    """An image from scratch, without any image builder; equal input gives an equal archive."""
    layer = tar_bytes(files, mode=0o755)
    config = json_bytes(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
        }
    )
    manifest = json_bytes(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor(config, "application/vnd.oci.image.config.v1+json"),
            "layers": [descriptor(layer, "application/vnd.oci.image.layer.v1.tar")],
        }
    )
    listed = descriptor(manifest, "application/vnd.oci.image.manifest.v1+json") | {
        "annotations": {NAME_ANNOTATION: name}
    }
    blobs = {BLOBS + digest(blob).removeprefix("sha256:"): blob for blob in (layer, config, manifest)}
    index = json_bytes({"schemaVersion": 2, "manifests": [listed]})
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(tar_bytes({"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": index, **blobs}))


def tar_bytes(files: Mapping[str, bytes], *, mode: int = 0o644) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return written.getvalue()


def json_bytes(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def descriptor(content: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": digest(content), "size": len(content)}


def stream_missing(image: Path, target: IO[bytes], *, present: Collection[str]) -> None:
    """Write an image archive, or an unpacked OCI layout, as a tar without the blobs in `present` (digests)."""
    with tarfile.open(fileobj=target, mode="w|") as archive:
        if image.is_dir():
            for path in sorted(path for path in image.rglob("*") if path.is_file()):
                name = str(path.relative_to(image))
                if not is_present(name, present):
                    archive.add(path, name)
            return
        with tarfile.open(image, mode="r:") as source:
            for member in wanted_members(source, present):
                archive.addfile(member, source.extractfile(member) if member.isfile() else None)


def wanted_members(source: tarfile.TarFile, present: Collection[str]) -> Iterator[tarfile.TarInfo]:
    return (member for member in source if not is_present(member.name, present))


def is_present(name: str, present: Collection[str]) -> bool:
    path = name.removeprefix("./")
    return path.startswith(BLOBS) and f"sha256:{path.removeprefix(BLOBS)}" in present
