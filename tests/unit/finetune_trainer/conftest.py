"""Fixtures for tests of the trainer: a tokenizer, vision-language models and a claimed output folder."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from transformers import PreTrainedTokenizerFast

from finetune_trainer.checkpoint.output_folder import OutputFolder
from testing.builders.identity import identity
from testing.models import tiny_text, tiny_vision


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the tiny test models."""
    return tiny_text.build_tokenizer()


@pytest.fixture(scope="session")
def get_vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that builds the tiny model of a type once; tests must not change its folder."""
    return cache(lambda model_type: tiny_vision.build(tmp_path_factory.mktemp(model_type), model_type))


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    """Return an output folder that attempt 0 has claimed."""
    output = OutputFolder(tmp_path / "output", identity())
    output.claim(overwrite=False)
    return output


@pytest.fixture
def process_group() -> Iterator[None]:
    """Initialize a process group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
