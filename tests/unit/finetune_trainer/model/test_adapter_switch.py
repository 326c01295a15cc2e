"""Tests of the switch between the trained model and the reference model of DPO."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.model.adapter_switch import AdapterSwitch
from finetune_trainer.model.lora import add_adapters, add_reference_adapter
from testing.models import attention_families

INPUTS = torch.arange(1, 9).unsqueeze(0)
# Options of peft by the class that wraps the modules that are trained beside LoRA
WRAPPER_OPTIONS: dict[type[AuxiliaryTrainingWrapper], tuple[dict[str, Any], ...]] = {
    ModulesToSaveWrapper: tuple({"modules_to_save": [name]} for name in ("embed_tokens", "norm", "lm_head")),
    TrainableTokensWrapper: ({"trainable_token_indices": {"embed_tokens": [2, 5]}},),
}


def build_model() -> Any:
    return attention_families.build_model(attention_families.CONFIGS["llama"](), dtype=torch.float32)


def add_trained_adapter(model: Any, *, dropout: float = 0.0) -> Any:
    """Add an adapter that changes the logits."""
    # products with 13 / 4 are rounded
    lora = Lora(r=4, lora_alpha=13, lora_dropout=dropout, target_modules=("all-linear",))
    adapted: Any = add_adapters(model, lora, seed=0)
    change_adapter(adapted)
    return adapted.train()


def change_adapter(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05


@torch.no_grad()
def compute_logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=INPUTS).logits
    return logits


def test_reference_is_the_model_without_adapters() -> None:
    expected = compute_logits(build_model())
    model = add_trained_adapter(build_model(), dropout=0.5)

    with AdapterSwitch(model).use_reference():
        logits = compute_logits(model)

    assert torch.equal(logits, expected)


def test_reference_is_the_adapter_that_is_trained_further(tmp_path: Path) -> None:
    model = add_trained_adapter(build_model())
    expected = compute_logits(model)
    model.save_pretrained(tmp_path)
    add_reference_adapter(model, str(tmp_path))
    change_adapter(model)
    trained = compute_logits(model)

    with AdapterSwitch(model).use_reference():
        logits = compute_logits(model)

    assert torch.equal(logits, expected), "the log-ratios of the first step are exactly 0"
    assert not torch.allclose(trained, expected, atol=1e-3)
    assert torch.equal(compute_logits(model), trained)


def test_all_wrappers_of_peft_are_tested() -> None:
    assert set(AuxiliaryTrainingWrapper.__subclasses__()) == WRAPPER_OPTIONS.keys()


@pytest.mark.parametrize("options", [each for kind in WRAPPER_OPTIONS.values() for each in kind], ids=str)
def test_reference_has_the_modules_of_the_adapter_that_is_trained_further(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    first = get_peft_model(build_model(), LoraConfig(target_modules="all-linear", exclude_modules="lm_head", **options))
    change_adapter(first)
    first.save_pretrained(tmp_path)
    expected = compute_logits(first)
    model: Any = add_adapters(build_model(), Lora(adapter=str(tmp_path)), seed=0)
    base = compute_logits(build_model())
    add_reference_adapter(model, str(tmp_path))
    change_adapter(model)
    trained = compute_logits(model)

    with AdapterSwitch(model).use_reference():
        logits = compute_logits(model)
    model.set_adapter("reference")
    by_peft = compute_logits(model)

    assert torch.equal(logits, by_peft)
    assert torch.allclose(logits, expected, atol=1e-6)
    model.set_adapter("default")
    assert torch.equal(compute_logits(model), trained)
    assert min((trained - expected).abs().max(), (base - expected).abs().max()) > 1e-2
    del model.peft_config["reference"]
    with AdapterSwitch(model).use_reference():
        logits = compute_logits(model)
    with model.disable_adapter():
        assert torch.equal(logits, compute_logits(model))


@pytest.mark.parametrize("fails", [False, True])
def test_switch_restores_the_trained_model(*, fails: bool) -> None:
    model = add_trained_adapter(build_model())
    trained = compute_logits(model)
    switch = AdapterSwitch(model)

    try:
        with switch.use_reference():
            assert not any(module.training for module in model.modules())
            assert not fails, "the forward pass fails"
    except AssertionError:
        assert fails

    assert all(module.training for module in model.modules())
    assert torch.equal(compute_logits(model), trained)


def test_switch_does_not_change_which_weights_need_gradients() -> None:
    """FSDP2 checks this in its first forward pass only, and a check of each weight takes milliseconds."""
    model = add_trained_adapter(build_model())
    switch = AdapterSwitch(model)
    trained_names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    with patch("torch.Tensor.requires_grad_", side_effect=AssertionError("requires_grad is changed")) as change:
        with switch.use_reference():
            reference_names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert not change.called

    assert trained_names
    assert reference_names == trained_names


def test_model_that_is_evaluated_stays_in_evaluation_mode() -> None:
    model = add_trained_adapter(build_model()).eval()

    with AdapterSwitch(model).use_reference():
        pass

    assert not any(module.training for module in model.modules())
