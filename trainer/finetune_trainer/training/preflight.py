"""Preflight: forward and backward passes before the first step, without side effects, to fail early."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_trainer.data.collator import Collator, MultimodalCollator
from finetune_trainer.data.epoch_order import Item
from finetune_trainer.data.length_stats import format_rows, select_cheapest_item, select_costliest_items
from finetune_trainer.data.packing import PackOrder
from finetune_trainer.distributed.collectives import all_gather_objects
from finetune_trainer.distributed.heartbeat_writer import measure_peak_memory
from finetune_trainer.errors import InvalidSpec, ModelError
from finetune_trainer.model.attention_backend import SDPA, choose_default_attention
from finetune_trainer.model.load import get_pad_token_id
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.model.varlen_support import select_text_attention
from finetune_trainer.parallel.model_state import iterate_trained_parameters
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.isolation_check import IsolationProbe, draw_parts, find_fault
from finetune_trainer.units import GIB


class IsolationCallback(TrainerCallback):  # type: ignore[misc]
    """Checks the logits of sequences in micro-batches before training, with the wrapped model on every rank."""

    def __init__(self, trainer: GlobalMeanTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        with self._trainer.discard_side_effects():
            check_isolation(self._trainer)


class PreflightCallback(TrainerCallback):  # type: ignore[misc]
    """Checks gradients and memory before training, with the wrapped model on every rank."""

    def __init__(self, trainer: GlobalMeanTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        trainer = self._trainer
        with trainer.discard_side_effects():
            if isinstance(trainer.model_wrapped, DistributedDataParallel):
                warm_up_ddp(trainer, trainer.model_wrapped)
            if trainer.inputs.plan.spec.training.probe:
                probe_memory(trainer)


def check_isolation(trainer: GlobalMeanTrainer) -> None:
    """Check that each sequence of a micro-batch has the logits that it would have alone (collective).

    If that fails for `varlen` that `auto` chose, use padded rows. Raises: InvalidSpec.
    """
    if (fault := find_fault_of_any_rank(trainer)) and trainer.inputs.padded_layout:
        use_padded_rows(trainer, fault)
        fault = find_fault_of_any_rank(trainer)
    if fault is None:
        return
    inputs = trainer.inputs
    field, advice = "spec.model.name", "choose a causal language model"
    if inputs.layout.padding_free:
        field, advice = f"spec.model.attnImplementation: with {VARLEN}", f"set {SDPA}"
    elif isinstance(inputs.data.order, PackOrder):
        field, advice = "spec.dataset.packing", "leave packing out"
    raise InvalidSpec(f'{field}: in model "{inputs.plan.spec.model.name}", {fault}; {advice}')


def find_fault_of_any_rank(trainer: GlobalMeanTrainer) -> str | None:
    """Return the fault that the first rank finds in the logits of micro-batches; None if there is none (collective)."""
    # Do not compile layers for the probe, which has other lengths than most micro-batches.
    is_compiled = trainer.inputs.plan.spec.training.torch_compile
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        try:
            fault = find_fault(
                trainer.model_wrapped,
                build_probe(trainer),
                trainer.args.device,
                partial(use_default_attention, trainer.model) if trainer.inputs.layout.padding_free else nullcontext,
            )
        except TypeError as error:
            fault = f"the forward pass does not accept a micro-batch ({error})"
    return next(filter(None, all_gather_objects(fault)), None)


def build_probe(trainer: GlobalMeanTrainer) -> IsolationProbe:
    """Build the check of the layout of training, with at most two rows.

    Some attention kernels detect the boundaries of sequences from the position ids only at batch size 1.
    """
    inputs, args = trainer.inputs, trainer.args
    layout, vision = inputs.layout, inputs.data.vision
    rows = 1 if layout.padding_free else min(inputs.plan.batch.micro_batch_size, 2)
    return IsolationProbe(
        draw_parts(inputs.tokenizer, trainer.model.config, rows=rows),
        layout,
        rows,
        packed=isinstance(inputs.data.order, PackOrder) or layout.padding_free,
        use_mrope=vision is not None and vision.family.uses_mrope,
        pad_id=get_pad_token_id(inputs.tokenizer),
        dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32,
    )


def use_padded_rows(trainer: GlobalMeanTrainer, fault: str) -> None:
    """Replace `varlen` by padded rows. The processes of the data loader, which copy the collator, have not started."""
    inputs, collate = trainer.inputs, cast("Collator | MultimodalCollator", trainer.inputs.collate)
    attention, layout = choose_default_attention(trainer.model.config), inputs.padded_layout
    assert layout is not None
    for model in filter(None, (trainer.model, inputs.reference_model)):
        set_text_attention(model, attention)
    collate.use_layout(layout)
    note = f"{attention} with padded rows instead of {VARLEN}: {fault}"
    notes = {**inputs.notes, "attention": note}
    trainer.inputs = replace(inputs, layout=layout, padded_layout=None, notes=notes)
    if inputs.ranks.is_rank_zero:
        print(f"attention: {note}", flush=True)


@contextmanager
def use_default_attention(model: Any) -> Iterator[None]:
    """Use attention that needs no lengths of sequences in the `with` block, instead of `varlen`."""
    set_text_attention(model, choose_default_attention(model.config))
    try:
        yield
    finally:
        set_text_attention(model, VARLEN)


def set_text_attention(model: Any, name: str) -> None:
    """Set the attention implementation of the text part of a model."""
    model.set_attn_implementation(select_text_attention(model.config, name))


def run_forward_and_backward(trainer: GlobalMeanTrainer, model: torch.nn.Module, items: Sequence[Item]) -> None:
    """Run the forward and backward pass of a training step on one micro-batch with these items."""
    inputs = trainer.inputs
    batch = trainer._prepare_inputs(inputs.collate([trainer.train_samples[item] for item in items]))
    torch.stack(trainer.sum_losses(model, batch)).sum().backward()  # type: ignore[no-untyped-call]


def warm_up_ddp(trainer: GlobalMeanTrainer, model: DistributedDataParallel) -> None:
    """Run the shortest sample through DDP on every rank, so that DDP rebuilds its buckets before the first step.

    It rebuilds them once, after the first exchange of gradients. With more than two ranks that changes the order of
    additions: without this pass, a resumed run would differ in the last bits. Raises: ModelError if a trained parameter
    gets no gradient, which DDP would report in the second step without its name.
    """
    model.train()  # type: ignore[no-untyped-call]
    run_forward_and_backward(trainer, model, [select_cheapest_item(trainer.inputs.data.order)])
    unused = [name for name, parameter in iterate_trained_parameters(trainer.model) if parameter.grad is None]
    if unused:
        raise ModelError(
            f'model "{trainer.inputs.plan.spec.model.name}": {len(unused)} trained parameters get no gradient, such as'
            f" {unused[0]}, but plain data parallelism needs all; exclude them (spec.lora.targetModules, or"
            " spec.model.freeze for a vision-language model), or set spec.fsdp"
        )


def probe_memory(trainer: GlobalMeanTrainer) -> None:
    """Run the most expensive micro-batch, so that insufficient memory fails the run now instead of hours later."""
    inputs = trainer.inputs
    items = select_costliest_items(inputs.data.order, inputs.plan.batch.micro_batch_size)
    if inputs.ranks.is_rank_zero:  # before the pass, so that the log contains the rows even if memory runs out
        print(f"probe: the costliest micro-batch: {', '.join(format_rows(inputs.data.train, items))}", flush=True)
    model = trainer.model_wrapped.train()
    without_sync = model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
    with without_sync:
        run_forward_and_backward(trainer, model, items)
    if inputs.ranks.is_rank_zero:
        print(f"probe: it fits; peak memory {measure_peak_memory() / GIB:.2f} GiB before optimizer states", flush=True)
