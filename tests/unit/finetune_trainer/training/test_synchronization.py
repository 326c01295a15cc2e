"""Tests that the losses of a micro-batch are computed without waiting for the GPU.

Fake tensors have no values: an operation whose result the process has to know, such as `nonzero` or `item`, raises an
error. On a GPU, each such operation waits for all earlier ones.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from finetune_api.v1alpha1.methods import Dpo
from finetune_api.v1alpha1.training import Training
from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.token_dataset import IGNORE_INDEX, REFERENCE_LOGPS
from finetune_trainer.methods.dpo import LOSSES, DpoTrainer
from finetune_trainer.methods.sft import SftTrainer
from finetune_trainer.model.attention_backend import SDPA
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.loss_averaging import MetricSums
from testing.models import attention_families

LAYOUTS = {VARLEN: SequenceLayout(padding_free=True), SDPA: SequenceLayout(masks_padding=False)}


def build_trainer(trainer_class: type[GlobalMeanTrainer], **attributes: Any) -> Any:
    """Return a trainer that only computes losses."""
    trainer: Any = trainer_class.__new__(trainer_class)
    trainer.inputs = SimpleNamespace(plan=SimpleNamespace(spec=SimpleNamespace(training=Training())))
    trainer.metric_sums = MetricSums()
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def build_batch(layout: SequenceLayout, *, sequences_per_row: int) -> MicroBatch:
    """Build a micro-batch of rows with weighted targets and, for pairs, reference log-probabilities."""
    rows = []
    for length in (5, 3):
        ids = torch.arange(length)
        labels = torch.where(ids > 0, ids, IGNORE_INDEX)
        sequence = {"input_ids": ids, "labels": labels, "weights": torch.full((length,), 0.5)}
        if sequences_per_row == 2:
            sequence[REFERENCE_LOGPS] = torch.zeros(1)
        rows.append((sequence,) * sequences_per_row)
    return Collator(0, layout)(rows)


def compute_on_fake_tensors(trainer: Any, attention: str, *, sequences_per_row: int) -> tuple[torch.Tensor, ...]:
    config = attention_families.CONFIGS["llama"]()
    batch = build_batch(LAYOUTS[attention], sequences_per_row=sequences_per_row)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = attention_families.build_model(config, attn_implementation=attention).train()
        losses: tuple[torch.Tensor, ...] = trainer.sum_losses(model, batch._map_tensors(mode.from_tensor))
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        return losses


@pytest.mark.parametrize("attention", LAYOUTS)
def test_sft_does_not_wait_for_the_gpu(attention: str) -> None:
    losses = compute_on_fake_tensors(build_trainer(SftTrainer), attention, sequences_per_row=1)

    assert [loss.shape for loss in losses] == [()]


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("attention", LAYOUTS)
def test_dpo_does_not_wait_for_the_gpu(attention: str, loss_type: str) -> None:
    dpo = Dpo.model_validate(
        {"lossType": loss_type, "rpoAlpha": 0.5} | ({"labelSmoothing": 0.1} if loss_type == "robust" else {})
    )

    losses = compute_on_fake_tensors(build_trainer(DpoTrainer, _dpo=dpo), attention, sequences_per_row=2)

    assert [loss.shape for loss in losses] == [(), ()]


@pytest.mark.parametrize(
    "operation", [lambda losses: losses[losses > 0], lambda losses: (losses > 0).nonzero()], ids=["mask", "nonzero"]
)
def test_the_tests_detect_a_wait(
    operation: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = SftTrainer.sum_losses

    def compute_with_wait(*arguments: Any) -> Any:
        losses = compute(*arguments)
        operation(losses[0].expand(3))
        return losses

    monkeypatch.setattr(SftTrainer, "sum_losses", compute_with_wait)

    with pytest.raises(DynamicOutputShapeException):
        compute_on_fake_tensors(build_trainer(SftTrainer), VARLEN, sequences_per_row=1)
