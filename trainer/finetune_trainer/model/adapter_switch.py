"""Runs a model with adapters as the reference model of DPO, and back, in each micro-batch (decisions/535)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from finetune_trainer.model.lora import REFERENCE_ADAPTER


class AdapterSwitch:
    """Switches a model from the trained adapter to the reference adapter, or to no adapter.

    It switches all modules that hold a copy in training: layers with an adapter, and wrappers of modules that are
    trained as a whole (`modules_to_save`) or in some rows (`trainable_token_indices`). Unlike the functions of peft, it
    neither examines the whole model each time, nor changes which weights need gradients, which FSDP2 determines in its
    first forward pass.
    """

    def __init__(self, model: Any) -> None:
        self._modules = tuple(model.modules())
        kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
        self._layers = tuple(module for module in self._modules if isinstance(module, kinds))
        self._has_reference = REFERENCE_ADAPTER in model.peft_config

    @contextmanager
    def use_reference(self) -> Iterator[None]:
        """Run the model as the reference model, with dropout disabled."""
        was_training = self._modules[0].training
        active_adapters = [layer._active_adapter for layer in self._layers]
        self._set_training(False)
        for layer in self._layers:
            if self._has_reference:
                layer._active_adapter = [REFERENCE_ADAPTER]
            else:
                layer._disable_adapters = True
        try:
            yield
        finally:
            for layer, adapter in zip(self._layers, active_adapters, strict=True):
                layer._active_adapter, layer._disable_adapters = adapter, False
            self._set_training(was_training)

    def _set_training(self, is_training: bool) -> None:
        for module in self._modules:
            object.__setattr__(module, "training", is_training)  # ten times as fast as that of Module
