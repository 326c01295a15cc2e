"""Write OCI image archives, and stream images without the blobs that the receiver already has."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO

NAME_ANNOTATION = "io.containerd.image.name"
BLOBS = "blobs/sha256/"
CHUNK_BYTES = 1 << 20


def write_single_layer_image(
    archive: Path, *, name: str, files: Mapping[str, bytes], entrypoint: tuple[str, ...]
) -> None:
    """Write a reproducible single-layer image, without an image builder."""
    layer = pack_tar(files, mode=0o755)
    config = encode_json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": [compute_digest(layer)]},
        }
    )
    manifest = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": make_descriptor(config, "application/vnd.oci.image.config.v1+json"),
            "layers": [make_descriptor(layer, "application/vnd.oci.image.layer.v1.tar")],
        }
    )
    entry = make_descriptor(manifest, "application/vnd.oci.image.manifest.v1+json") | {
        "annotations": {NAME_ANNOTATION: name}
    }
    blobs = {BLOBS + compute_digest(blob).removeprefix("sha256:"): blob for blob in (layer, config, manifest)}
    index = encode_json({"schemaVersion": 2, "manifests": [entry]})
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(pack_tar({"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": index, **blobs}))


def pack_tar(files: Mapping[str, bytes], *, mode: int = 0o644) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def encode_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def compute_digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def make_descriptor(content: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": compute_digest(content), "size": len(content)}


def stream_missing(image: Path, target: IO[bytes], *, present_digests: Collection[str]) -> None:
    """Write an image archive, or an unpacked OCI layout, as a tar without the blobs in `present_digests`."""
    with tarfile.open(fileobj=target, mode="w|") as archive:
        if image.is_dir():
            for path in sorted(path for path in image.rglob("*") if path.is_file()):
                name = str(path.relative_to(image))
                if not is_present(name, present_digests):
                    archive.add(path, name)
            return
        with tarfile.open(image, mode="r:") as source:
            for member in list_missing_members(source, present_digests):
                archive.addfile(member, source.extractfile(member) if member.isfile() else None)


def list_missing_members(source: tarfile.TarFile, present_digests: Collection[str]) -> Iterator[tarfile.TarInfo]:
    return (member for member in source if not is_present(member.name, present_digests))


def is_present(name: str, present_digests: Collection[str]) -> bool:
    path = name.removeprefix("./")
    return path.startswith(BLOBS) and f"sha256:{path.removeprefix(BLOBS)}" in present_digests


def keep_newest_image_uncompressed(layout: Path) -> None:
    """Delete superseded images from a layout and store gzip layers uncompressed, under the digest of their content.

    Nodes then need not decompress the layers, and the next push skips existing layers. buildah compresses all layers of
    a layout but does not recognize its own compressed layers.
    """
    index = json.loads((layout / "index.json").read_text())
    entry = index["manifests"][-1]
    manifest = json.loads(get_blob_path(layout, entry["digest"]).read_bytes())
    manifest["layers"] = [decompress_layer(layout, layer) for layer in manifest["layers"]]
    manifest_bytes = encode_json(manifest)
    get_blob_path(layout, compute_digest(manifest_bytes)).write_bytes(manifest_bytes)
    newest_entry = entry | {"digest": compute_digest(manifest_bytes), "size": len(manifest_bytes)}
    (layout / "index.json").write_bytes(encode_json(index | {"manifests": [newest_entry]}))
    referenced_digests = {
        get_blob_path(layout, descriptor["digest"])
        for descriptor in (newest_entry, manifest["config"], *manifest["layers"])
    }
    for path in (layout / BLOBS).iterdir():
        if path not in referenced_digests:
            path.unlink()


def decompress_layer(layout: Path, layer: dict[str, object]) -> dict[str, object]:
    media_type = str(layer["mediaType"])
    if not media_type.endswith("+gzip"):
        return layer
    content_hash, size, temporary_path = hashlib.sha256(), 0, layout / "layer.unfinished"
    with gzip.open(get_blob_path(layout, str(layer["digest"]))) as source, temporary_path.open("wb") as target:
        while chunk := source.read(CHUNK_BYTES):
            content_hash.update(chunk)
            size += target.write(chunk)
    content_digest = f"sha256:{content_hash.hexdigest()}"
    temporary_path.rename(get_blob_path(layout, content_digest))
    return {"mediaType": media_type.removesuffix("+gzip"), "digest": content_digest, "size": size}


def get_blob_path(layout: Path, blob_digest: str) -> Path:
    return layout / BLOBS / blob_digest.removeprefix("sha256:")
