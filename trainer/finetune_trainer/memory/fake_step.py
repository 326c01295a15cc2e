"""A training step on tensors without data: what it allocates beside weights, gradients and optimizer states."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune_trainer.memory.fused_kernels import use_fused_attention, use_fused_dropout
from finetune_trainer.vision.video_processor import Features

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of logits and token ids

_BLOCK = 512  # bytes; torch's CUDA allocator rounds up to it


class Phase(StrEnum):
    """Stretches of a step. The peak of each grows evenly with the number of layers; that of the whole step does not."""

    SIGHT = "sight"  # the vision tower, there and back
    FORWARD = "forward"
    LOSS = "loss"
    LAYERS = "layers"
    EMBEDDING = "embedding"


@dataclass(frozen=True)
class Live:
    """Bytes that live at one moment."""

    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.logits


@dataclass(frozen=True)
class Step:
    """What one rank does with one micro-batch."""

    batch: int
    length: int
    checkpointing: bool
    autocast: torch.dtype | None  # of matrix products, where it is not that of the weights
    loss: Loss
    learns: bool = True  # else it evaluates
    packed: bool = False  # several rows in one sample


@dataclass(frozen=True)
class Shown:
    """A micro-batch of a model that sees."""

    batch: Features  # all inputs of the model
    tower: str  # name of the module that looks at pixels


def simulate_step(model: Any, step: Step, shown: Shown | None = None) -> dict[Phase, Live]:
    """The highest moment of each phase. `model` holds fake tensors; all samples are as long as `step` says."""
    model.train(step.learns)
    use_fused_attention(model, packed=step.packed)
    use_fused_dropout(model)
    if step.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        if parameter.requires_grad and step.learns:
            parameter.grad = torch.empty_like(parameter)  # of the micro-batches before
    inputs = shown.batch if shown else {"input_ids": torch.zeros(step.batch, step.length, dtype=torch.int64)}
    ids = inputs["input_ids"]
    ledger = _Ledger(model, shown.tower if shown else None)
    for pixels in inputs.values():
        if pixels.is_floating_point():
            ledger.book(pixels)  # they stay for the whole step
    with ledger, torch.set_grad_enabled(step.learns):
        with torch.autocast("cpu", dtype=step.autocast or torch.bfloat16, enabled=step.autocast is not None):
            output = model(**inputs, use_cache=False)
        ledger.phase = Phase.LOSS
        loss = step.loss(output.logits, ids)
        del output
        if step.learns:
            loss.backward()  # type: ignore[no-untyped-call]
    return ledger.peaks


def loss_of_every_token(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """sft.target_losses where no token is masked, which takes the most. It picks by number: by mask needs data."""
    targets = ids[:, 1:]
    chosen = torch.zeros(targets.numel(), dtype=torch.int64)
    return torch.nn.functional.cross_entropy(
        logits[:, :-1][chosen, chosen].float(), targets.reshape(-1), reduction="sum"
    )


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Books every storage from the operation that makes it to its end. What the model holds before does not count."""

    def __init__(self, model: Any, tower: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = Phase.FORWARD
        self.peaks: dict[Phase, Live] = {phase: Live() for phase in Phase}
        self._vocabulary = model.get_output_embeddings().weight.shape[0]
        self._held = tuple(chain(model.parameters(), model.buffers(), (p.grad for p in model.parameters())))
        self._known = {each.untyped_storage()._cdata for each in self._held if each is not None}
        self._activations = 0
        self._logits = 0
        self._follow(model)
        if tower is not None:
            self._follow_tower(model.get_base_model() if hasattr(model, "get_base_model") else model, tower)

    def _follow_tower(self, model: Any, tower: str) -> None:
        """It looks before the first layer, and learns after the last gradient of the embeddings, if it does."""

        def seen(_module: Any, _inputs: Any, made: Any) -> None:
            self.phase = Phase.FORWARD
            for tensor in tree_leaves(made):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _gradient: setattr(self, "phase", Phase.SIGHT))  # type: ignore[no-untyped-call]

        module = model.get_submodule(tower)
        module.register_forward_pre_hook(lambda _module, _inputs: setattr(self, "phase", Phase.SIGHT))
        module.register_forward_hook(seen)

    def _follow(self, model: Any) -> None:
        """The backward pass enters a phase when the gradient of what that phase made is there."""

        def enter(tensor: torch.Tensor, phase: Phase) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda _gradient: setattr(self, "phase", phase))  # type: ignore[no-untyped-call]

        model.get_output_embeddings().register_forward_pre_hook(lambda _module, inputs: enter(inputs[0], Phase.LAYERS))
        model.get_input_embeddings().register_forward_hook(lambda _m, _inputs, made: enter(made, Phase.EMBEDDING))

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.book(tensor)
        return made

    def book(self, tensor: torch.Tensor) -> None:
        """Once per storage."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._strike, storage._cdata, size, is_logits)
        self._add(size, is_logits=is_logits)
        if self._activations + self._logits > self.peaks[self.phase].total:
            self.peaks[self.phase] = Live(self._activations, self._logits)

    def _strike(self, key: int, size: int, is_logits: bool) -> None:
        self._known.discard(key)
        self._add(-size, is_logits=is_logits)

    def _add(self, size: int, *, is_logits: bool) -> None:
        if is_logits:
            self._logits += size
        else:
            self._activations += size
