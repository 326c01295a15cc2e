"""The images and videos of tokenised sequences: paths, and the bytes of those that stood in their rows. No pixels."""

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from finetune_trainer.data_sources.media import Kind, Picture

_ENDS, _SOURCES, _BYTES = "image-ends.npy", "images.json", "images.bin"


class AlbumWriter:
    """Takes the images of one sequence after the other."""

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

    def add(self, pictures: Iterable[Picture]) -> None:
        for picture in pictures:
            source: dict[str, Any] = {"path": picture.path}
            if picture.data:
                source = {"at": (self._bytes.tell(), len(picture.data))}
                self._bytes.write(picture.data)
            elif picture.frames:
                source = {"frames": picture.frames}
            self._sources.append(source if picture.kind is Kind.IMAGE else {**source, "kind": picture.kind})
        self._ends.append(len(self._sources))


class Album:
    """The images by the number of their sequence."""

    def __init__(self, folder: Path) -> None:
        self._bytes = folder / _BYTES
        self._ends = np.load(folder / _ENDS)
        self._sources: list[dict[str, Any]] = json.loads((folder / _SOURCES).read_text(encoding="utf-8"))
        self.kinds = frozenset(Kind(source.get("kind", Kind.IMAGE)) for source in self._sources)

    def __getitem__(self, sequence: int) -> tuple[Picture, ...]:
        start = int(self._ends[sequence - 1]) if sequence else 0
        return tuple(self._picture(source) for source in self._sources[start : int(self._ends[sequence])])

    def _picture(self, source: dict[str, Any]) -> Picture:
        kind = Kind(source.get("kind", Kind.IMAGE))
        if "at" not in source:
            return Picture(source.get("path", ""), kind=kind, frames=tuple(source.get("frames", ())))
        start, size = source["at"]
        with self._bytes.open("rb") as file:
            file.seek(start)
            return Picture(data=file.read(size), kind=kind)
