"""Stores the images and videos of tokenized sequences as paths or encoded files, never as decoded pixels."""

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from finetune_supervisor.contract import parse_json
from finetune_trainer.data_sources.media import MediaItem, Modality
from finetune_trainer.foreign_files import read_regular_file

_ENDS, _BYTES = "image-ends.npy", "images.bin"
SOURCES_FILE = "images.json"


class MediaStoreWriter:
    """Writes the images and videos of tokenized sequences to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends = array("q")
        self._sources: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._bytes = (self._folder / _BYTES).open("wb")
        return self

    def __exit__(self, error_type: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._bytes.close()
        if error_type is None:
            np.save(self._folder / _ENDS, np.array(self._ends, dtype=np.int64))
            (self._folder / SOURCES_FILE).write_text(json.dumps(self._sources), encoding="utf-8")

    def add(self, items: Iterable[MediaItem]) -> None:
        """Append the images and videos of the next sequence."""
        for item in items:
            source: dict[str, Any] = {"path": item.path, "checksum": item.checksum}
            if item.data:
                source = {"at": (self._bytes.tell(), len(item.data))}
                self._bytes.write(item.data)
            elif item.frames:
                source = {"frames": item.frames, "checksum": item.checksum}
            self._sources.append(source if item.modality is Modality.IMAGE else {**source, "kind": item.modality})
        self._ends.append(len(self._sources))


class MediaStore:
    """Reads the images and videos of a sequence by its index."""

    def __init__(self, folder: Path) -> None:
        self._bytes = folder / _BYTES
        self._ends = np.load(folder / _ENDS)
        self._sources: list[dict[str, Any]] = parse_json(read_regular_file(folder / SOURCES_FILE))
        self.modalities = frozenset(_get_modality(source) for source in self._sources)

    def __getitem__(self, index: int) -> tuple[MediaItem, ...]:
        start = int(self._ends[index - 1]) if index else 0
        return tuple(self._load_item(source) for source in self._sources[start : int(self._ends[index])])

    def _load_item(self, source: dict[str, Any]) -> MediaItem:
        modality = _get_modality(source)
        if "at" not in source:
            return MediaItem(source.get("path", ""), modality=modality, frames=tuple(source.get("frames", ())))
        start, size = source["at"]
        with self._bytes.open("rb") as file:
            file.seek(start)
            return MediaItem(data=file.read(size), modality=modality)


def _get_modality(source: dict[str, Any]) -> Modality:
    return Modality(source.get("kind", Modality.IMAGE))
