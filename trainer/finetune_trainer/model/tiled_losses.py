"""Compute the losses of tokens in tiles, so that the logits of a micro-batch never exist at once (decisions/526).

During a forward pass, the output layer of the model returns losses instead of logits. Since they are computed inside
the output layer, the hooks of FSDP2 and ZeRO-3 gather its weights as usual.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

TILE_BYTES = 256 * 2**20  # logits of a tile in float32; computing a tile needs about four times as much

TileLosses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # hidden states and target ids to losses


@dataclass(frozen=True)
class Targets:
    """Tokens to predict: indices of their predecessors in the flattened batch, and their ids, each (targets,)."""

    positions: torch.Tensor
    ids: torch.Tensor


def compute_losses(model: Any, inputs: Mapping[str, Any], targets: Targets) -> tuple[torch.Tensor, Any]:
    """Run the model, and return the cross entropy of each target in float32, (targets,), and the model's output.

    The logits of the output are meaningless. In the first call, the model runs twice (collective, like each pass).
    """
    layer = _get_output_layer(model)
    operations = _get_operations(model, layer, inputs)
    if operations is None:
        return compute_losses_at_once(model, inputs, targets)
    compute_logits, results = layer.forward, dict[str, torch.Tensor]()

    def compute_tile(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return _compute_cross_entropy(_apply(operations, compute_logits(hidden)), ids)

    def compute_all(hidden: torch.Tensor) -> torch.Tensor:
        selected, tile_size = hidden.flatten(0, -2).index_select(0, targets.positions), _count_tile_tokens(layer)
        if len(selected) <= tile_size:
            losses = compute_tile(selected, targets.ids)
        else:
            weights = tuple(parameter for parameter in layer.parameters() if parameter.requires_grad)
            losses = _TiledLosses.apply(  # type: ignore[no-untyped-call]
                compute_tile, tile_size, selected, targets.ids, *weights
            )
        results["losses"] = losses.view(1, -1, 1)
        return results["losses"]

    def receive(losses: torch.Tensor) -> None:
        # ZeRO-3 replaces the tensor. FSDP2 hooks into the tensor and then rounds it to the dtype of the model.
        if losses.dtype == results["losses"].dtype:
            results["losses"] = losses

    with _replace_forward(layer, compute_all, receive):
        output = model(**inputs)
    return results["losses"].flatten(), output


def compute_losses_at_once(model: Any, inputs: Mapping[str, Any], targets: Targets) -> tuple[torch.Tensor, Any]:
    """Return the same as `compute_losses`, computed from the logits of all tokens."""
    output = model(**inputs)
    return _compute_cross_entropy(output.logits.flatten(0, 1).index_select(0, targets.positions), targets.ids), output


def _compute_cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), ids, reduction="none")


def _get_output_layer(model: Any) -> Any:
    """Return the output layer of a model, also if the model is wrapped by DDP or DeepSpeed."""
    return getattr(model, "module", model).get_output_embeddings()


def _count_tile_tokens(layer: Any) -> int:
    """Return the number of tokens in a tile."""
    vocabulary_size: int = layer.out_features
    return max(1, TILE_BYTES // (4 * vocabulary_size))


@contextmanager
def _replace_forward(
    layer: Any, forward: Callable[[torch.Tensor], Any], receive: Callable[[Any], Any]
) -> Iterator[None]:
    """Replace the layer's forward function. `receive` gets its result after the hooks of other libraries."""
    previous = layer.__dict__.get("forward")  # set if another library has replaced it
    handle = layer.register_forward_hook(lambda _layer, _inputs, result: receive(result))
    layer.forward = forward
    try:
        yield
    finally:
        handle.remove()
        del layer.forward
        if previous is not None:
            layer.forward = previous


class _TiledLosses(torch.autograd.Function):
    """Losses of more than one tile of tokens; saves gradients or hidden states instead of logits.

    If the output layer is frozen, the forward pass computes the gradients of the hidden states, so that the logits are
    computed once. Otherwise, the backward pass computes the logits again, because the gradients of the weights depend
    on those of the losses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute_tile: TileLosses,
        tile_size: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        tiles = tuple(zip(torch.split(hidden, tile_size), torch.split(ids, tile_size), strict=True))
        ctx.weights = weights
        # in float16, the gradients have to be scaled, as by the gradients of the losses
        ctx.has_gradients = hidden.requires_grad and not weights and hidden.dtype is not torch.float16
        if not ctx.has_gradients:
            ctx.compute_tile, ctx.tile_size = compute_tile, tile_size
            ctx.autocast = _capture_autocast(hidden.device.type)
            ctx.save_for_backward(hidden, ids)
            with torch.no_grad():
                return torch.cat([compute_tile(*tile) for tile in tiles])
        losses: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for tile_hidden, tile_ids in tiles:
            with torch.enable_grad():
                leaf = tile_hidden.detach().requires_grad_()
                tile_losses = compute_tile(leaf, tile_ids)
            gradients += torch.autograd.grad(tile_losses, leaf, torch.ones_like(tile_losses))
            losses.append(tile_losses.detach())
        ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.has_gradients:
            (gradients,) = ctx.saved_tensors
            return None, None, (gradients * grad_losses.unsqueeze(1)).to(gradients.dtype), None
        hidden, ids = ctx.saved_tensors
        hidden_gradients: list[torch.Tensor] = []
        weight_gradients = [torch.zeros_like(weight, dtype=torch.float32) for weight in ctx.weights]
        tiles = zip(*(torch.split(tensor, ctx.tile_size) for tensor in (hidden, ids, grad_losses)), strict=True)
        for tile_hidden, tile_ids, tile_grad_losses in tiles:
            with torch.enable_grad(), ctx.autocast():
                leaf = tile_hidden.detach().requires_grad_()
                tile_losses = ctx.compute_tile(leaf, tile_ids)
            gradient, *gradients = torch.autograd.grad(tile_losses, (leaf, *ctx.weights), tile_grad_losses)
            hidden_gradients.append(gradient)
            for total, weight_gradient in zip(weight_gradients, gradients, strict=True):
                total += weight_gradient
        rounded = [total.to(weight.dtype) for total, weight in zip(weight_gradients, ctx.weights, strict=True)]
        return None, None, torch.cat(hidden_gradients), None, *rounded


def _capture_autocast(device_type: str) -> Callable[[], torch.autocast]:
    """Return a function that restores the current autocast settings, which a backward pass does not have."""
    dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled)


Operation = tuple[Callable[..., torch.Tensor], tuple[Any, ...], dict[str, Any]]  # function and its other arguments


def _apply(operations: tuple[Operation, ...], logits: torch.Tensor) -> torch.Tensor:
    for function, arguments, keywords in operations:
        logits = function(logits, *arguments, **keywords)
    return logits


class _Recorder:
    """Stands for logits in a forward pass, and records the elementwise operations on them without computing them."""

    def __init__(self, operations: tuple[Operation, ...] = ()) -> None:
        self.operations = operations

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., torch.Tensor], _types: Any, args: Any = (), kwargs: Any = None
    ) -> "_Recorder":
        """Record a call of one of torch's functions. Raises: TypeError, if it may not be elementwise."""
        if function not in _ELEMENTWISE or not isinstance(args[0], cls):
            raise TypeError(f"{function.__name__} of logits cannot be recorded")
        return cls((*args[0].operations, (function, args[1:], kwargs or {})))


def _record_method(name: str) -> Callable[..., _Recorder]:
    def method(recorder: _Recorder, *args: Any, **kwargs: Any) -> _Recorder:
        return _Recorder.__torch_function__(getattr(torch.Tensor, name), (), (recorder, *args), kwargs)

    return method


_METHODS = ("__truediv__", "__mul__", "div", "mul", "float", "to", "tanh")
_ELEMENTWISE = {torch.tanh, torch.mul, torch.div, *(getattr(torch.Tensor, name) for name in _METHODS)}
for _name in _METHODS:
    setattr(_Recorder, _name, _record_method(_name))

_operations: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Operation, ...] | None] = weakref.WeakKeyDictionary()


def _get_operations(model: Any, layer: Any, inputs: Mapping[str, Any]) -> tuple[Operation, ...] | None:
    """Return what the model applies to the result of its output layer, such as a soft cap; None if that is unknown.

    In the first call, they are recorded in a forward pass without logits, in which dropout is off.
    """
    if not hasattr(layer, "out_features"):
        return None
    if layer not in _operations:
        was_training = model.training
        model.eval()
        with torch.no_grad(), _replace_forward(layer, lambda _hidden: _Recorder(), lambda _: None):
            try:
                logits = model(**inputs).logits
            except (TypeError, AttributeError):  # an operation that is not recorded
                logits = None
        model.train(was_training)
        _operations[layer] = logits.operations if isinstance(logits, _Recorder) else None
    return _operations[layer]
