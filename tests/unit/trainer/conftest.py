"""What several tests of the trainer need: a tokenizer, and an output folder that was claimed."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_trainer.output import Output
from support import tiny
from support.identity import identity


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.build_tokenizer()


@pytest.fixture
def output(tmp_path: Path) -> Output:
    """Claimed by attempt 0."""
    output = Output(tmp_path / "output", identity())
    output.claim(overwrite=False)
    return output
