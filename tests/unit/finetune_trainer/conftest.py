"""Fixtures for tests of the trainer: a tokenizer and a claimed output folder."""

from pathlib import Path

import pytest
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from finetune_trainer.checkpoint.output_folder import OutputFolder
from testing.builders.identity import identity
from testing.models import tiny_text

settings.register_profile("no-deadline", deadline=None)  # hypothesis examples may be slow on a busy host
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the tiny test models."""
    return tiny_text.build_tokenizer()


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    """Return an output folder that attempt 0 has claimed."""
    output = OutputFolder(tmp_path / "output", identity())
    output.claim(overwrite=False)
    return output
