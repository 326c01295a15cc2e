"""Stores which images and videos a tokenized sequence contains: paths or encoded files, never decoded pixels."""

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from finetune_trainer.data_sources.media import MediaItem, Modality

_ENDS, _SOURCES, _BYTES = "image-ends.npy", "images.json", "images.bin"


class MediaStoreWriter:
    """Writes the media of the sequences, one sequence after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends = array("q")
        self._sources: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._bytes = (self._folder / _BYTES).open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._bytes.close()
        if kind is None:
            np.save(self._folder / _ENDS, np.array(self._ends, dtype=np.int64))
            (self._folder / _SOURCES).write_text(json.dumps(self._sources), encoding="utf-8")

    def add(self, items: Iterable[MediaItem]) -> None:
        """Append the media of the next sequence."""
        for item in items:
            source: dict[str, Any] = {"path": item.path}
            if item.data:
                source = {"at": (self._bytes.tell(), len(item.data))}
                self._bytes.write(item.data)
            elif item.frames:
                source = {"frames": item.frames}
            self._sources.append(source if item.modality is Modality.IMAGE else {**source, "kind": item.modality})
        self._ends.append(len(self._sources))


class MediaStore:
    """Returns the media of a sequence by its index."""

    def __init__(self, folder: Path) -> None:
        self._bytes = folder / _BYTES
        self._ends = np.load(folder / _ENDS)
        self._sources: list[dict[str, Any]] = json.loads((folder / _SOURCES).read_text(encoding="utf-8"))
        self.modalities = frozenset(_modality(source) for source in self._sources)

    def __getitem__(self, sequence: int) -> tuple[MediaItem, ...]:
        start = int(self._ends[sequence - 1]) if sequence else 0
        return tuple(self._load(source) for source in self._sources[start : int(self._ends[sequence])])

    def _load(self, source: dict[str, Any]) -> MediaItem:
        modality = _modality(source)
        if "at" not in source:
            return MediaItem(source.get("path", ""), modality=modality, frames=tuple(source.get("frames", ())))
        start, size = source["at"]
        with self._bytes.open("rb") as file:
            file.seek(start)
            return MediaItem(data=file.read(size), modality=modality)


def _modality(source: dict[str, Any]) -> Modality:
    return Modality(source.get("kind", Modality.IMAGE))
