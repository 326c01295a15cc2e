"""Datasets of tokenized rows, memory-mapped from the token cache, with or without pixel inputs."""

import copy
import json
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from finetune_trainer.chat_template.samples import SPANNING_TOKEN
from finetune_trainer.checkpoint.row_identity import FILE_PREFIX, MEDIA, PLAIN_TEXT_RULE, ROWS
from finetune_trainer.checksums import FileRecord, unseal
from finetune_trainer.data.media_store import SOURCES_FILE, MediaStore
from finetune_trainer.data.row_filter import RowStats
from finetune_trainer.data_sources.file_digests import FileDigest
from finetune_trainer.data_sources.media import MediaItem
from finetune_trainer.data_sources.row_origins import RowOrigins
from finetune_trainer.foreign_files import read_regular_file
from finetune_trainer.vision.processor import VisionProcessor

META_FILE = "meta.json"  # of an entry of the token cache
IGNORE_INDEX = -100  # label of a token that is not a target
FILLER = -1  # index of the filler sample, which has one token and no targets and completes a round of micro-batches

# Features of a sequence; all others are pixel inputs.
REFERENCE_LOGPS = "reference_logps"  # log-probability under DPO's reference model, (1,)
POSITION_IDS = "position_ids"
MROPE_POSITION_IDS = "mrope_position_ids"  # time, height and width positions for models with M-RoPE, (seq, 3)
TOKEN_FEATURES = ("input_ids", "labels", "weights", POSITION_IDS, MROPE_POSITION_IDS, REFERENCE_LOGPS)

Features = dict[str, torch.Tensor]


class TokenDataset(Dataset[tuple[Features, ...]]):
    """Dataset of rows; a row is a tuple of sequences: one for SFT, the chosen and the rejected one for DPO."""

    def __init__(self, folder: Path) -> None:
        """Open an entry of the token cache; one that is damaged raises errors of several classes."""
        meta = unseal(read_regular_file(folder / META_FILE), sealed_key="records")
        self.folder = folder
        self.cache_key = folder.name  # depends on the files and the settings of tokenization
        self.records = {name: FileRecord(*record) for name, record in meta.get("records", {}).items()}
        self.stats = RowStats.from_json(meta["counted"])
        self.files = tuple(FileDigest(**file) for file in meta["files"])
        self._tokenization: dict[str, str] = meta.get("tokenization", {})
        self._sequences_per_row: int = meta["sequences"]
        self._weighted: bool = meta["weighted"]
        self._ends = np.load(folder / "ends.npy")
        self._origins = RowOrigins(tuple(meta["sources"]), np.load(folder / "places.npy"))
        self._tokens = _map_file(folder / "tokens.bin", np.int32)
        self._weights = _map_file(folder / "weights.bin", np.float32)
        if {len(self._tokens), len(self._weights)} != {int(self._ends[-1]) if len(self._ends) else 0}:
            raise ValueError("tokens.bin or weights.bin has another size than was written")
        self.media_store = MediaStore(folder)
        self._rows: NDArray[np.int64] = np.arange(len(self._ends) // self._sequences_per_row)

    @property
    def content_digest(self) -> str:
        """Hash of the tokenized rows; empty if a release without checksums tokenized them."""
        checksums = sorted((name, record.crc32) for name, record in self.records.items())
        return sha256(json.dumps(checksums).encode()).hexdigest()[:32] if checksums else ""

    @property
    def identity(self) -> dict[str, str]:
        """The digest of the rows, and what they were computed from (decisions/547); empty without a digest."""
        if not self.content_digest:
            return {}
        files = {f"{FILE_PREFIX}{file.path}": file.sha256 for file in self.files}
        rule = {PLAIN_TEXT_RULE: SPANNING_TOKEN} if SPANNING_TOKEN in self.stats.notes else {}
        media = {MEDIA: str(self.records[SOURCES_FILE].crc32)} if self.media_store.modalities else {}
        return {ROWS: self.content_digest, **files, **self._tokenization, **rule, **media}

    def select(self, indices: NDArray[np.int64]) -> "TokenDataset":
        """Return a dataset of the rows with these indices."""
        selection = copy.copy(self)
        selection._rows = self._rows[indices]
        return selection

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Token count of the longest sequence of each row, (rows,)."""
        longest: NDArray[np.int64] = self._compute_sequence_lengths().max(axis=1)
        return longest

    @property
    def token_count(self) -> int:
        """Total token count of all sequences."""
        return int(self._compute_sequence_lengths().sum())

    def count_token_ids(self, token_ids: Collection[int]) -> NDArray[np.int64]:
        """Return how many tokens of each row have one of these ids, (rows,).

        A pair has the larger count of its two sequences.
        """
        starts = np.concatenate(([0], self._ends[:-1]))
        counts = np.add.reduceat(np.isin(self._tokens, list(token_ids)), starts, dtype=np.int64)
        largest: NDArray[np.int64] = counts.reshape(-1, self._sequences_per_row)[self._rows].max(axis=1)
        return largest

    @property
    def origin_ids(self) -> NDArray[np.int64]:
        """Id of the source row of each row, (rows,); copies of a source row have the same id."""
        return self._origins.numbers[self._rows]

    def get_origin(self, index: int) -> str:
        """Return the file and the line or row number of the row, for error messages."""
        return self._origins[int(self._rows[index])]

    def get_media(self, index: int) -> tuple[tuple[MediaItem, ...], ...]:
        """Return the images and videos of each sequence of a row."""
        if index == FILLER:
            return ((),) * self._sequences_per_row
        first = int(self._rows[index]) * self._sequences_per_row
        return tuple(self.media_store[first + offset] for offset in range(self._sequences_per_row))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Features, ...]:
        if index == FILLER:
            return (self._build_features(torch.zeros(1, dtype=torch.int64), torch.zeros(1)),) * self._sequences_per_row
        first = int(self._rows[index]) * self._sequences_per_row
        return tuple(self._load_sequence(first + offset) for offset in range(self._sequences_per_row))

    def _load_sequence(self, sequence_index: int) -> Features:
        start, end = int(self._ends[sequence_index - 1]) if sequence_index else 0, int(self._ends[sequence_index])
        tokens = torch.from_numpy(self._tokens[start:end].astype(np.int64))
        return self._build_features(tokens, torch.from_numpy(self._weights[start:end].copy()))

    def _build_features(self, tokens: torch.Tensor, weights: torch.Tensor) -> Features:
        """Return the input ids and labels, and the weights if any weight in the dataset is neither 0 nor 1."""
        features = {"input_ids": tokens, "labels": tokens.masked_fill(weights == 0, IGNORE_INDEX)}
        return {**features, "weights": weights} if self._weighted else features

    def _compute_sequence_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sequence, (rows, sequences per row)."""
        lengths: NDArray[np.int64] = np.diff(self._ends, prepend=0).reshape(-1, self._sequences_per_row)[self._rows]
        return lengths


class MultimodalDataset(Dataset[tuple[Features, ...]]):
    """Adds pixel inputs to rows with images and videos, which are decoded in the data loader process."""

    def __init__(self, rows: TokenDataset, vision: VisionProcessor) -> None:
        self._rows = rows
        self._vision = vision

    def __getitem__(self, index: int) -> tuple[Features, ...]:
        origin = "filler" if index == FILLER else self._rows.get_origin(index)
        media_by_sequence = self._rows.get_media(index)
        # Both sequences of a pair get the same tensors, which the collator then includes once.
        pixels = {media: self._vision.load_pixels(origin, media) for media in set(media_by_sequence) if media}
        return tuple(
            {**tokens, **pixels.get(media, {})}
            for tokens, media in zip(self._rows[index], media_by_sequence, strict=True)
        )


def _map_file(path: Path, dtype: type[np.generic]) -> "np.ndarray[Any, Any]":
    """Memory-map the file, or return an empty array if the file is empty, because mmap rejects empty files."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
