"""Tests the check that sequences in one row are isolated and that attention is causal."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finetune_trainer.data.collator import SequenceLayout
from finetune_trainer.data.epoch_order import RowOrder
from finetune_trainer.data.packing import PackOrder
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.training.isolation_check import build_probe, computes_shared_prompts, is_isolated
from finetune_trainer.training.preflight import check_isolation
from finetune_trainer.varlen_inputs import SequenceLengths
from testing.models import attention_families

CPU = torch.device("cpu")
PADDING_FREE = SequenceLayout(padding_free=True)
UNMASKED = SequenceLayout(masks_padding=False, pad_multiple=64)


def build_model(family: str = "llama", **options: Any) -> Any:
    return attention_families.build_model(attention_families.CONFIGS[family](), **options)


def build_trainer(model: Any, layout: SequenceLayout, *, packing: bool, micro_batch_size: int = 4) -> Any:
    """Return what the check reads of a trainer."""
    lengths = np.array([4, 4])
    inputs = SimpleNamespace(
        layout=layout,
        data=SimpleNamespace(
            order=PackOrder(lengths, max_length=8, seed=0) if packing else RowOrder(lengths, seed=0), vision=None
        ),
        plan=SimpleNamespace(
            batch=SimpleNamespace(micro_batch_size=micro_batch_size),
            spec=SimpleNamespace(model=SimpleNamespace(name="tiny"), training=SimpleNamespace(torch_compile=False)),
        ),
    )
    return SimpleNamespace(inputs=inputs, model_wrapped=model, args=SimpleNamespace(device=CPU))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", attention_families.CONFIGS)
def test_suitable_models_pass_every_check_and_keep_their_training_mode(family: str, rows: int) -> None:
    padded, padding_free = build_model(family).train(), build_model(family, attn_implementation=VARLEN)

    for model, layout, packed in (
        (padded, SequenceLayout(), True),
        (padded, UNMASKED, False),
        (padding_free, PADDING_FREE, True),
    ):
        assert is_isolated(model, build_probe(layout, rows=rows, packed=packed, use_mrope=False), CPU)
    assert computes_shared_prompts(padding_free, CPU, use_mrope=False)
    assert padded.training
    assert not padding_free.training


def test_a_model_that_ignores_the_lengths_is_rejected() -> None:
    """transformers' SDPA isolates rows by position ids, but eager attention of several sequences needs a mask."""
    model = build_model(attn_implementation="eager")
    config = model.config
    config._attn_implementation_internal = "unmasked"
    from transformers import AttentionInterface
    from transformers.models.llama.modeling_llama import eager_attention_forward

    AttentionInterface.register("unmasked", eager_attention_forward)
    with pytest.raises(InvalidSpec, match=r"with varlen, the sequences of a micro-batch of model \"tiny\" influence"):
        check_isolation(build_trainer(model, PADDING_FREE, packing=False))


def test_a_model_that_does_not_attend_to_shared_prompts_is_rejected() -> None:
    class WithoutPrefixes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(attn_implementation=VARLEN)

        def forward(self, sequence_lengths: SequenceLengths, **inputs: Any) -> Any:
            return self.model(**inputs, sequence_lengths=SequenceLengths(sequence_lengths.values))

    sharing = SequenceLayout(padding_free=True, shares_prompts=True)
    check_isolation(build_trainer(WithoutPrefixes(), PADDING_FREE, packing=False))
    with pytest.raises(InvalidSpec, match=r"do not attend to a prompt that they share; set sdpa"):
        check_isolation(build_trainer(WithoutPrefixes(), sharing, packing=False))


def test_a_model_that_carries_state_across_rows_is_rejected_for_packs() -> None:
    model = attention_families.build_model(attention_families.build_linear_attention_config())

    with pytest.raises(InvalidSpec, match=r'spec\.dataset\.packing: model "tiny" does not isolate the rows'):
        check_isolation(build_trainer(model, SequenceLayout(), packing=True))


def test_a_model_that_carries_state_across_rows_needs_no_mask_for_padding() -> None:
    model = attention_families.build_model(attention_families.build_linear_attention_config())

    check_isolation(build_trainer(model, UNMASKED, packing=False))


def test_a_model_that_attends_to_later_tokens_is_rejected_if_padding_has_no_mask() -> None:
    model = build_model("gemma3_text")
    model.config.use_bidirectional_attention = True
    model.config.is_causal = False

    with pytest.raises(InvalidSpec, match=r'spec\.model\.name: model "tiny" attends to later tokens'):
        check_isolation(build_trainer(model, UNMASKED, packing=False))
    check_isolation(build_trainer(model, SequenceLayout(), packing=False))


def test_a_model_without_position_ids_is_rejected() -> None:
    with pytest.raises(InvalidSpec, match=r'spec\.dataset\.packing: model "tiny" does not accept position_ids'):
        check_isolation(build_trainer(torch.nn.Linear(1, 1), SequenceLayout(), packing=True))


def test_logits_that_are_not_finite_are_left_to_the_check_of_the_loss() -> None:
    model = build_model(attn_implementation=VARLEN)
    model.model.norm.weight.data.fill_(torch.nan)

    check_isolation(build_trainer(model, PADDING_FREE, packing=False))


def test_rounding_to_16_bits_is_tolerated() -> None:
    """Kernels may round differently if other rows change."""

    class Rounding(torch.nn.Module):
        def __init__(self, steps: int) -> None:
            super().__init__()
            self.steps, self.calls = steps, 0

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            self.calls += 1
            logits = torch.ones(*input_ids.shape, 8, dtype=torch.bfloat16)
            return SimpleNamespace(logits=logits + self.calls * self.steps * torch.finfo(torch.bfloat16).eps)

    probe = build_probe(SequenceLayout(), rows=1, packed=True, use_mrope=False)
    assert is_isolated(Rounding(1), probe, CPU)
    assert not is_isolated(Rounding(16), probe, CPU)
