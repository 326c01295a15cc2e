"""Tests the log line about a saved checkpoint."""

from finetune_trainer.training.checkpoint_state import describe_save


def test_a_fast_save_is_only_reported() -> None:
    assert describe_save("step-00000020", 40.0, grace_seconds=120) == "checkpoint: step-00000020 saved in 40.0 s"


def test_a_slow_save_is_a_warning_with_the_grace_period_to_set() -> None:
    line = describe_save("step-00000020", 84.25, grace_seconds=120)

    assert line.startswith("checkpoint: step-00000020 saved in 84.2 s; warning: ")
    assert line.endswith(
        "has 120 s for its current step and a checkpoint; set spec.terminationGracePeriodSeconds to at least 253"
    )
