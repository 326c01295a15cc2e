"""Tests that an intact checkpoint whose files cannot be read is not reported as damaged."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_trainer import publish_result
from finetune_trainer.errors import StorageFault
from finetune_trainer.publish_result import replace_weights
from finetune_trainer.training import checkpoint_state
from finetune_trainer.training.checkpoint_state import restore_checkpoint

CHECKPOINT = Path("/output/checkpoints/step-00000007")
TRAINER: Any = SimpleNamespace(model=None)


@pytest.fixture(autouse=True)
def unreadable_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an open file fail, as on a network file system without its server."""

    def fail(_folder: Path) -> None:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(checkpoint_state, "build_state_access", lambda _trainer: None)
    for module in (checkpoint_state, publish_result):
        monkeypatch.setattr(module, "StateReader", fail)


def test_a_read_error_while_a_job_resumes_is_a_storage_fault() -> None:
    with pytest.raises(StorageFault, match=f"{CHECKPOINT} cannot be read: Connection timed out"):
        restore_checkpoint(TRAINER, CHECKPOINT)


def test_a_read_error_of_the_best_weights_is_a_storage_fault() -> None:
    with pytest.raises(StorageFault, match=f"{CHECKPOINT} cannot be read: Connection timed out"):
        replace_weights({}, CHECKPOINT)
