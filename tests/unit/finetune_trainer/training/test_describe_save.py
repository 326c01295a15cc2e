"""Tests the log line about a saved checkpoint."""

from finetune_trainer.training.checkpoint_saver import SavedCheckpoint
from finetune_trainer.training.checkpoint_state import describe_save


def test_a_fast_save_is_only_reported() -> None:
    line = describe_save(SavedCheckpoint("step-00000020", 40.0, 1.5), grace_seconds=120)

    assert line == "checkpoint: step-00000020 saved in 40.0 s, training waited 1.5 s"


def test_a_slow_save_is_a_warning_with_the_grace_period_to_set() -> None:
    line = describe_save(SavedCheckpoint("step-00000020", 84.25, 3.0), grace_seconds=120)

    assert line.startswith("checkpoint: step-00000020 saved in 84.2 s, training waited 3.0 s; warning: ")
    assert line.endswith(
        "has 120 s for its current step and a checkpoint; set spec.terminationGracePeriodSeconds to at least 253"
    )
