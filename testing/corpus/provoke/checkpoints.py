"""Errors of checkpoints that are missing, truncated, altered or of another model."""

import io
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

_WEIGHTS = {"weight": torch.zeros(64, 64)}


def _load_safetensors(folder: Path, alter: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(alter(safetensors.torch.save(_WEIGHTS)))
    safetensors.torch.load_file(path)


def _use_unknown_dtype(content: bytes) -> bytes:
    return content.replace(b'"F32"', b'"Q99"')


def _change_shape(content: bytes) -> bytes:
    return content.replace(b"[64,64]", b"[65,64]")


def _flip_header(content: bytes) -> bytes:
    return content[:8] + bytes(byte ^ 0xFF for byte in content[8:12]) + content[12:]


def _load_torch(folder: Path, content: bytes, *, weights_only: bool = True) -> None:
    path = folder / "model.pt"
    path.write_bytes(content)
    torch.load(path, weights_only=weights_only)


def _save_torch(*, legacy: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save(_WEIGHTS, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


class _Config:
    """Class of the training program that a checkpoint contains."""


def _load_pickled_object(folder: Path) -> None:
    torch.save(_Config(), folder / "model.pt")
    torch.load(folder / "model.pt")


def _load_missing_shard(folder: Path) -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained("sh", max_shard_size="5KB")
    sorted(folder.glob("sh/*.safetensors"))[1].unlink()
    AutoModelForCausalLM.from_pretrained("./sh")


PROVOCATIONS: dict[str, Callable[[Path], object]] = {
    "safetensors header with an unknown dtype": lambda folder: _load_safetensors(folder, _use_unknown_dtype),
    "safetensors offset flipped": lambda folder: _load_safetensors(folder, _change_shape),
    "safetensors cut in half": lambda folder: _load_safetensors(folder, lambda content: content[: len(content) // 2]),
    "safetensors of 4 bytes": lambda folder: _load_safetensors(folder, lambda content: content[:4]),
    "safetensors of zeros": lambda folder: _load_safetensors(folder, lambda content: bytes(len(content))),
    "safetensors header bytes flipped": lambda folder: _load_safetensors(folder, _flip_header),
    "zip checkpoint cut in half": lambda folder: _load_torch(folder, _save_torch()[: len(_save_torch()) // 2]),
    "zip checkpoint, head zeroed": lambda folder: _load_torch(folder, bytes(1024) + _save_torch()[1024:]),
    "legacy checkpoint cut": lambda folder: _load_torch(folder, _save_torch(legacy=True)[:-8192]),
    "legacy checkpoint cut in its pickle": lambda folder: _load_torch(
        folder, _save_torch(legacy=True)[:15], weights_only=False
    ),
    "garbage in place of a checkpoint": lambda folder: _load_torch(folder, b"\x91" * 4096),
    "garbage, weights_only=False": lambda folder: _load_torch(folder, b"t" * 4096, weights_only=False),
    "torch.load weights_only on pickled config object": _load_pickled_object,
    "second shard gone": _load_missing_shard,
    "all zeros after a power cut": lambda folder: _load_torch(folder, bytes(4096), weights_only=False),
}
