"""Test that every training method has a trainer builder."""

from finetune_api.v1alpha1.methods import METHODS
from finetune_trainer.build_trainer import BUILDERS


def test_every_training_method_has_a_builder() -> None:
    assert set(BUILDERS) == set(METHODS)
