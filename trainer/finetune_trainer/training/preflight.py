"""Preflight: forward and backward passes before the first step, without side effects, to fail early."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_trainer.data.epoch_order import Item
from finetune_trainer.data.length_stats import format_rows, select_cheapest_item, select_costliest_items
from finetune_trainer.data.packing import PackOrder
from finetune_trainer.distributed.heartbeat_writer import measure_peak_memory
from finetune_trainer.errors import InvalidSpec, ModelError
from finetune_trainer.model.attention_backend import SDPA
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.parallel.model_state import iterate_trained_parameters
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.isolation_check import build_probe, computes_shared_prompts, is_isolated
from finetune_trainer.units import GIB


class PreflightCallback(TrainerCallback):  # type: ignore[misc]
    """Checks the isolation of sequences, gradients and memory before training, with the wrapped model on every rank."""

    def __init__(self, trainer: GlobalMeanTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        trainer = self._trainer
        with trainer.discard_side_effects():
            check_isolation(trainer)
            if isinstance(trainer.model_wrapped, DistributedDataParallel):
                warm_up_ddp(trainer, trainer.model_wrapped)
            if trainer.inputs.plan.spec.training.probe:
                probe_memory(trainer)


def check_isolation(trainer: GlobalMeanTrainer) -> None:
    """Check what the layout of the micro-batches relies on (collective).

    Raises: InvalidSpec if sequences in one row influence each other, or if a model that gets no mask for padding
    attends to later tokens.
    """
    inputs = trainer.inputs
    layout, has_packs = inputs.layout, isinstance(inputs.data.order, PackOrder)
    packed = has_packs or layout.padding_free
    if not packed and layout.masks_padding:
        return
    vision = inputs.data.vision
    use_mrope = vision is not None and vision.family.uses_mrope
    probe = build_probe(layout, rows=min(inputs.plan.batch.micro_batch_size, 2), packed=packed, use_mrope=use_mrope)
    name = f'model "{inputs.plan.spec.model.name}"'
    model, device = trainer.model_wrapped, trainer.args.device
    # Do not compile layers for the probe, which has fewer tokens than most micro-batches.
    is_compiled = inputs.plan.spec.training.torch_compile
    try:
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            if is_isolated(model, probe, device) and (
                not layout.shares_prompts or computes_shared_prompts(model, device, use_mrope=use_mrope)
            ):
                return
    except TypeError as error:
        raise InvalidSpec(
            f"spec.dataset.packing: {name} does not accept position_ids ({error}); leave packing out"
        ) from error
    if layout.padding_free:
        raise InvalidSpec(
            f"spec.model.attnImplementation: with {VARLEN}, the sequences of a micro-batch of {name} influence each"
            f" other, or do not attend to a prompt that they share; set {SDPA}"
        )
    if has_packs:
        raise InvalidSpec(
            f"spec.dataset.packing: {name} does not isolate the rows of a pack: one row changes the logits of another;"
            " leave packing out"
        )
    raise InvalidSpec(
        f"spec.model.name: {name} attends to later tokens, so it cannot be trained to predict the next token; choose"
        " a causal language model"
    )


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
