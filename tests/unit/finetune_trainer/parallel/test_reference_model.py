"""Tests that DPO's reference model computes exactly as the policy does before its first update."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator

from finetune_trainer.parallel.autocast_layers import iterate_autocast_layers
from finetune_trainer.parallel.reference_model import prepare_reference_model
from testing.models import attention_families

INPUTS = torch.arange(1, 33).reshape(2, 16)
# `native_amp` and `autocast` are those of an Accelerator for mixed precision in one process on a CPU
ACCELERATOR = cast(
    "Accelerator",
    SimpleNamespace(
        native_amp=True,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16),
        device=torch.device("cpu"),
        state=SimpleNamespace(),
    ),
)


def build_float32_model(family: str, *, tied: bool, stored_dtype: torch.dtype) -> Any:
    config = attention_families.CONFIGS[family]()
    config.tie_word_embeddings = tied
    model = attention_families.build_model(config, dtype=torch.float32)
    return model.to(stored_dtype).float().eval()


@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", attention_families.CONFIGS)
def test_reference_has_the_logits_of_a_float32_policy_under_autocast(
    family: str, tied: bool, stored_dtype: torch.dtype
) -> None:
    policy = build_float32_model(family, tied=tied, stored_dtype=stored_dtype)
    reference = build_float32_model(family, tied=tied, stored_dtype=stored_dtype)

    reference = cast("Any", prepare_reference_model(reference, ACCELERATOR))
    with torch.no_grad():
        logits = reference(input_ids=INPUTS).logits
        with torch.autocast("cpu", torch.bfloat16):
            expected = policy(input_ids=INPUTS).logits

    assert torch.equal(logits, expected)
    layers = list(iterate_autocast_layers(reference))
    assert {layer.weight.dtype for layer in layers} == {torch.bfloat16}
    assert (reference.get_output_embeddings() in layers) is not tied
