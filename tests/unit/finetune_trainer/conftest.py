"""What several tests of the trainer need: a tokenizer, and an output folder that was claimed."""

from pathlib import Path

import pytest
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from finetune_trainer.checkpoint.output_folder import Output
from testing.builders.identity import identity
from testing.models import tiny_text as tiny

settings.register_profile("unhurried", deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.build_tokenizer()


@pytest.fixture
def output(tmp_path: Path) -> Output:
    """Claimed by attempt 0."""
    output = Output(tmp_path / "output", identity())
    output.claim(overwrite=False)
    return output
