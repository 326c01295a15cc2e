"""Simulate a training step on fake tensors to measure what it allocates besides the model's states (decisions/701)."""

import weakref
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune_trainer.memory.fused_kernels import MaskUse, use_fused_attention, use_fused_dropout
from finetune_trainer.model.lora import set_input_casts
from finetune_trainer.model.supported_types import ROUTER_LOGITS_OPTION
from finetune_trainer.model.tiled_losses import Targets, compute_losses, compute_losses_at_once
from finetune_trainer.vision.video_processor import Features

_BLOCK_BYTES = 512  # torch's CUDA allocator rounds sizes up to a multiple of this


class StepPhase(StrEnum):
    """Phases of a step. The peak of each phase is linear in the number of layers; the peak of the step is not."""

    VISION_TOWER = "vision_tower"  # forward and backward pass of the vision tower
    FORWARD = "forward"
    OUTPUT_LAYER = "output_layer"  # forward pass of the output layer, which computes losses in tiles
    LOSS = "loss"
    LAYERS = "layers"
    EMBEDDING = "embedding"


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes allocated for activations and logits at one moment of a step."""

    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """Return the sum of activations and logits in bytes."""
        return self.activations + self.logits


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated micro-batch of one rank; all samples have the same length."""

    batch: int  # number of sequences
    length: int  # tokens per sequence
    recomputation_interval: int | None  # n: every n-th layer recomputes its activations; None: none does
    autocast: torch.dtype | None  # dtype of matrix products; None: dtype of the weights
    is_training: bool = True  # False: evaluation, without a backward pass
    mask_use: MaskUse = MaskUse.PADDED_ROWS
    has_router_loss: bool = False  # True: the loss includes the auxiliary loss that balances experts
    without_savings: bool = False  # True: as in other trainers, with all logits and float32 inputs of adapters


@dataclass(frozen=True)
class MultimodalBatch:
    """A micro-batch of a vision-language model."""

    inputs: Features  # keyword arguments of the model
    vision_tower: str  # module name of the vision tower


def simulate_step(
    model: Any, step: SimulatedStep, multimodal: MultimodalBatch | None = None
) -> dict[StepPhase, ActivationMemory]:
    """Return the peak memory of each phase. All parameters of `model` must be fake tensors."""
    # Prepare the model as the trainer does, and simulate GPU kernels.
    model.train(step.is_training)
    use_fused_attention(model, step.mask_use)
    use_fused_dropout(model)
    if step.without_savings:
        set_input_casts(model, enabled=True)
    if step.recomputation_interval is not None:
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=step.recomputation_interval)
    for parameter in model.parameters():
        if parameter.requires_grad and step.is_training:
            parameter.grad = torch.empty_like(parameter)  # gradients that earlier micro-batches accumulated
    # Build the inputs; pixel values stay allocated during the whole step.
    inputs = multimodal.inputs if multimodal else {"input_ids": torch.zeros(step.batch, step.length, dtype=torch.int64)}
    ids = inputs["input_ids"]
    tracker = _StorageTracker(
        model, multimodal.vision_tower if multimodal else None, without_savings=step.without_savings
    )
    for tensor in inputs.values():
        if tensor.is_floating_point():
            tracker.track(tensor)
    # Run forward, loss and backward under the tracker.
    with tracker, torch.set_grad_enabled(step.is_training):
        with torch.autocast("cpu", dtype=step.autocast or torch.bfloat16, enabled=step.autocast is not None):
            options = {ROUTER_LOGITS_OPTION: True} if step.has_router_loss else {}
            compute = compute_losses_at_once if step.without_savings else compute_losses
            losses, output = compute(model, {**inputs, **options, "use_cache": False}, select_all_tokens(ids))
        tracker.phase = StepPhase.LOSS
        loss = losses.sum() + output.aux_loss if step.has_router_loss else losses.sum()
        del losses, output
        if step.is_training:
            loss.backward()
    return tracker.peaks


def select_all_tokens(ids: torch.Tensor) -> Targets:
    """Return all tokens but the first of each row as targets, which need the most memory. ids: (batch, seq)."""
    positions = torch.arange(ids.numel(), device=ids.device).view(ids.shape)[:, :-1].flatten()
    return Targets(positions, ids[:, 1:].reshape(-1))


class _StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of each storage until it is freed; excludes the storages of the model states."""

    def __init__(self, model: Any, vision_tower: str | None, *, without_savings: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = StepPhase.FORWARD
        self._output_layer_phase = StepPhase.FORWARD if without_savings else StepPhase.OUTPUT_LAYER
        self.peaks: dict[StepPhase, ActivationMemory] = {phase: ActivationMemory() for phase in StepPhase}
        self._vocab_size = model.get_output_embeddings().weight.shape[0]
        # Keep references, so that no tracked storage can reuse the address of a model state.
        self._model_states = tuple(chain(model.parameters(), model.buffers(), (p.grad for p in model.parameters())))
        self._tracked = {state.untyped_storage()._cdata for state in self._model_states if state is not None}
        self._activations = 0
        self._logits = 0
        self._hook_language_model(model)
        if vision_tower is not None:
            self._hook_vision_tower(model.get_base_model() if hasattr(model, "get_base_model") else model, vision_tower)

    def _hook_vision_tower(self, model: Any, vision_tower: str) -> None:
        """Enter the vision tower phase before its forward pass and, if it is trained, before its backward pass."""

        def leave_after_forward(_module: Any, _inputs: Any, outputs: Any) -> None:
            self.phase = StepPhase.FORWARD
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _grad: setattr(self, "phase", StepPhase.VISION_TOWER))  # type: ignore[no-untyped-call]

        module = model.get_submodule(vision_tower)
        module.register_forward_pre_hook(lambda _module, _inputs: setattr(self, "phase", StepPhase.VISION_TOWER))
        module.register_forward_hook(leave_after_forward)

    def _hook_language_model(self, model: Any) -> None:
        """Enter each phase of the backward pass as soon as the gradient of its output is computed."""

        def enter_on_gradient(tensor: torch.Tensor, phase: StepPhase) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda _grad: setattr(self, "phase", phase))  # type: ignore[no-untyped-call]

        def enter_output_layer(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            self.phase = self._output_layer_phase
            enter_on_gradient(inputs[0], StepPhase.LAYERS)

        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        output.register_forward_pre_hook(enter_output_layer)
        embedding.register_forward_pre_hook(lambda _module, _inputs: setattr(self, "phase", StepPhase.FORWARD))
        embedding.register_forward_hook(
            lambda _module, _inputs, outputs: enter_on_gradient(outputs, StepPhase.EMBEDDING)
        )

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.track(tensor)
        return result

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage of the tensor once, until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._tracked:
            return
        size_bytes = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._vocab_size
        self._tracked.add(storage._cdata)
        weakref.finalize(storage, self._untrack, storage._cdata, size_bytes, is_logits)
        self._add_bytes(size_bytes, is_logits=is_logits)
        if self._activations + self._logits > self.peaks[self.phase].total:
            self.peaks[self.phase] = ActivationMemory(self._activations, self._logits)

    def _untrack(self, address: int, size_bytes: int, is_logits: bool) -> None:
        self._tracked.discard(address)
        self._add_bytes(-size_bytes, is_logits=is_logits)

    def _add_bytes(self, size_bytes: int, *, is_logits: bool) -> None:
        if is_logits:
            self._logits += size_bytes
        else:
            self._activations += size_bytes
