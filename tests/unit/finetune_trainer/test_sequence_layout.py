"""Tests that the layout of micro-batches suits the attention implementation."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune_trainer.build_trainer import PAD_MULTIPLE, choose_sequence_layout
from finetune_trainer.data.collator import SequenceLayout
from finetune_trainer.model.attention_backend import EAGER, SDPA
from finetune_trainer.model.varlen_attention import VARLEN

MASKED, UNMASKED = SequenceLayout(), SequenceLayout(masks_padding=False)


def choose_layout(
    attention: str, *, device: str, is_multimodal: bool = False, router_loss: float | None = None, dpo: Any = None
) -> Any:
    spec: Any = SimpleNamespace(training=SimpleNamespace(router_aux_loss_coef=router_loss), dpo=dpo)
    description: Any = SimpleNamespace(attention=attention, vision=object() if is_multimodal else None)
    return choose_sequence_layout(spec, description, torch.device(device))


@pytest.mark.parametrize(
    ("attention", "options", "layout"),
    [
        pytest.param(SDPA, {}, UNMASKED, id="causal text"),
        pytest.param(SDPA, {"router_loss": 0.1}, MASKED, id="the auxiliary loss reads the mask"),
        pytest.param(SDPA, {"is_multimodal": True}, MASKED, id="images may be attended to in both directions"),
        pytest.param(EAGER, {}, MASKED, id="eager"),
        pytest.param("flash_attention_2", {}, MASKED, id="FlashAttention removes padding by the mask"),
    ],
)
def test_padded_rows_have_a_mask_unless_causal_attention_suffices(
    attention: str, options: dict[str, Any], layout: SequenceLayout
) -> None:
    assert choose_layout(attention, device="cpu", **options) == layout


def test_lengths_are_rounded_up_on_gpus() -> None:
    assert choose_layout(SDPA, device="cuda") == SequenceLayout(pad_multiple=PAD_MULTIPLE, masks_padding=False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_attention_that_knows_the_lengths_needs_no_padding(device: str) -> None:
    layout = choose_layout(VARLEN, device=device, is_multimodal=True, router_loss=0.1)

    assert layout == SequenceLayout(padding_free=True)


@pytest.mark.parametrize(("router_loss", "shares_prompts"), [(None, True), (0.1, False)])
def test_pairs_share_prompts_unless_the_router_loss_counts_them_twice(
    router_loss: float | None, shares_prompts: bool
) -> None:
    layout = choose_layout(VARLEN, device="cpu", router_loss=router_loss, dpo=object())

    assert layout == SequenceLayout(padding_free=True, shares_prompts=shares_prompts)
