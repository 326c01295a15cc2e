"""Tests the files with the tensors of a checkpoint, also against the reader of torch.distributed.checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from finetune_trainer.checkpoint import state_files
from finetune_trainer.checkpoint.state_files import READ_ERRORS, STATE_FOLDER, StateReader, write_state
from finetune_trainer.parallel.model_state import TensorRange

TENSORS = {"weight.a": torch.arange(12.0), "exp_avg.a": torch.arange(12.0) / 7, "weight.b": torch.tensor([5.0])}
BOUNDS = {"weight.a": (0, 5, 12), "exp_avg.a": (0, 5, 12), "weight.b": (0, 1, 1)}  # of two ranks


def write_ranks(folder: Path, tensors: Mapping[str, torch.Tensor], bounds: Mapping[str, Sequence[int]]) -> None:
    """Write the tensors as ranks do; rank r has the elements from bounds[r] to bounds[r + 1]."""
    rank_count = max(map(len, bounds.values())) - 1
    for rank in range(rank_count):
        ranges = {
            key: TensorRange(bounds[key][rank], tensor[bounds[key][rank] : bounds[key][rank + 1]])
            for key, tensor in tensors.items()
            if bounds[key][rank] < bounds[key][rank + 1]
        }
        write_state(ranges.items(), folder, rank=rank)


@st.composite
def draw_bounds(draw: st.DrawFn, size: int) -> list[int]:
    """Draw how up to four ranks divide a tensor; ranks may have no element."""
    inner = draw(st.lists(st.integers(0, size), max_size=3))
    return [0, *sorted(inner), size]


@given(st.data())
def test_any_range_can_be_read_whichever_ranks_wrote_it(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 30))
    tensor = torch.arange(float(size))
    start, stop = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    with TemporaryDirectory() as folder:
        write_ranks(Path(folder), {"key": tensor}, {"key": data.draw(draw_bounds(size))})

        assert torch.equal(StateReader(Path(folder)).read("key", start, stop), tensor[start:stop])


def test_torch_distributed_checkpoint_reads_the_files(tmp_path: Path) -> None:
    write_ranks(tmp_path, TENSORS, BOUNDS)

    loaded = {key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()}
    load(loaded, storage_reader=HuggingFaceStorageReader(str(tmp_path / STATE_FOLDER)), no_dist=True)

    assert all(torch.equal(loaded[key], tensor) for key, tensor in TENSORS.items())


def test_files_of_torch_distributed_checkpoint_are_read(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(str(tmp_path / STATE_FOLDER), save_distributed=True)
    save(dict(TENSORS), storage_writer=writer, no_dist=True)

    reader = StateReader(tmp_path)

    assert all(torch.equal(reader.read(key, 0, tensor.numel()), tensor) for key, tensor in TENSORS.items())


def test_a_rank_writes_files_of_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "MAX_FILE_BYTES", 60)  # 12 elements have 48 bytes

    paths = write_state(((key, TensorRange(0, tensor)) for key, tensor in TENSORS.items()), tmp_path, rank=3)

    assert [path.name for path in paths] == ["rank-00003-000.safetensors", "rank-00003-001.safetensors"]
    reader = StateReader(tmp_path)
    assert all(torch.equal(reader.read(key, 0, tensor.numel()), tensor) for key, tensor in TENSORS.items())


def test_views_of_the_same_tensor_are_written(tmp_path: Path) -> None:
    """ZeRO holds all parameters of a rank in one tensor."""
    flat = torch.arange(6.0)

    write_state({"a": TensorRange(0, flat[:2]), "b": TensorRange(0, flat[2:])}.items(), tmp_path, rank=0)

    assert torch.equal(StateReader(tmp_path).read("b", 0, 4), flat[2:])


def test_a_tensor_is_read_in_its_shape(tmp_path: Path) -> None:
    write_ranks(tmp_path, TENSORS, BOUNDS)

    tensor = StateReader(tmp_path).read_tensor("weight.a", torch.Size((3, 4)))

    assert torch.equal(tensor, TENSORS["weight.a"].view(3, 4))


def test_a_missing_part_is_an_error(tmp_path: Path) -> None:
    write_ranks(tmp_path, TENSORS, BOUNDS)
    (tmp_path / STATE_FOLDER / "rank-00001-000.safetensors").unlink()
    reader = StateReader(tmp_path)

    assert torch.equal(reader.read("weight.a", 0, 5), TENSORS["weight.a"][:5])
    with pytest.raises(ValueError, match=r"elements 5 to 12 of weight\.a are missing"):
        reader.read("weight.a", 3, 12)


@pytest.mark.parametrize(
    "metadata",
    [None, {"DCP_SHARDING_INFO": "{"}, {"DCP_SHARDING_INFO": '{"a": {}}'}, {"DCP_SHARDING_INFO": '{"a": 1}'}],
    ids=["no metadata", "no JSON", "no offsets", "wrong type"],
)
def test_damaged_metadata_raise_a_read_error(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    (tmp_path / STATE_FOLDER).mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / STATE_FOLDER / "rank-00000-000.safetensors", metadata=metadata)

    with pytest.raises(READ_ERRORS):
        StateReader(tmp_path)
