"""Parameter counts and bytes of a model, computed from its config by building it on torch's meta device."""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.errors import ModelError, first_line
from finetune_trainer.memory.data_dependent_shapes import ConcreteIntegerMode
from finetune_trainer.memory.fake_step import ActivationMemory, MultimodalBatch, SimulatedStep, StepPhase, simulate_step
from finetune_trainer.memory.fused_kernels import use_portable_experts
from finetune_trainer.memory.vision_sample import VisionSample, find_equal_tower_layers
from finetune_trainer.model.attention_backend import SDPA
from finetune_trainer.model.fake_weights import replace_meta_tensors
from finetune_trainer.model.lora import add_unloaded_adapters
from finetune_trainer.model.text_part import build_module_pattern, freeze_modules, is_inside
from finetune_trainer.model.truncated_config import find_per_layer_fields, truncate_layers
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.model.varlen_support import select_text_attention
from finetune_trainer.vision.freeze import PEFT_PREFIX, find_group, freeze_groups
from finetune_trainer.vision.towers import choose_auto_class

ADAMW_STATES = 2  # first and second moment of each gradient, in the dtype of the weight
_SMALLEST_EIGHT_BIT_SIZE, _EIGHT_BIT_BLOCK_SIZE = 4096, 256  # elements, in bitsandbytes
_FEWEST_LAYERS = 2  # smallest number of simulated layers; the memory of more layers is extrapolated


@dataclass(frozen=True)
class ModelShape:
    """Parameter counts and bytes of a model, before it is sharded."""

    parameters: int
    trained_parameters: int
    frozen_bytes: int
    trained_bytes: int
    buffer_bytes: int
    has_adapters: bool = False  # True: all trained parameters are adapters
    reference_bytes: int = 0  # bytes of the frozen reference model; 0 if there is no separate model
    releases_reference: bool = False  # whether the reference model is released before the first step
    eight_bit_moment_bytes: int = 0  # bytes of the moments of 8-bit AdamW; 0 with another optimizer
    published_bytes: int = 0  # of the model that rank 0 publishes: trained in full, or merged with an adapter
    # Sizes of the units that sharded training gathers, in elements:
    layer_parameters: int = 0  # largest decoder layer
    outer_parameters: int = 0  # parameters outside the decoder layers: embeddings, output
    largest_parameter: int = 0  # of those that are trained
    largest_weight_bytes: int = 0

    @property
    def resident_reference_bytes(self) -> int:
        """Bytes of the reference model during training."""
        return 0 if self.releases_reference else self.reference_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the moments of AdamW, without sharding."""
        return self.eight_bit_moment_bytes or ADAMW_STATES * self.trained_bytes

    @property
    def loaded_bytes(self) -> int:
        """Return the bytes of the trained parameters during loading, which always uses float32."""
        return 4 * self.trained_parameters


@dataclass(frozen=True)
class Architecture:
    """Arguments for building a model in its training configuration."""

    config: PretrainedConfig
    dtype: torch.dtype
    lora: Lora | None
    uniform_dtype: bool = False  # True: adapters have `dtype` too, instead of float32
    vision_sample: VisionSample | None = None  # None for a text model
    attention: str = SDPA  # eager, varlen, or SDPA for other fused implementations
    frozen_modules: tuple[str, ...] = ()  # modules that text does not reach (spec.model.textOnly)

    @property
    def is_quantized(self) -> bool:
        """Return whether the frozen weights under the adapters are quantized to 4 bits."""
        return self.lora is not None and self.lora.quantization is not None

    def build(self, *, layers: int | None = None) -> Any:
        """Build the model on the meta device, with all layers or only the first `layers`. Raises ModelError."""
        # Copy the config, because use_fused_attention changes its attention implementation.
        config = copy.deepcopy(self.config) if layers is None else truncate_layers(self.config, layers)
        sample = self.vision_sample
        try:
            with torch.device("meta"):
                model = choose_auto_class(config).from_config(
                    config, dtype=self.dtype, attn_implementation=_choose_simulated_option(config, self.attention)
                )
                freeze_modules(model, self.frozen_modules)
                exclude_modules = build_module_pattern(self.frozen_modules)
                if sample:
                    exclude_modules = freeze_groups(model, sample.vision, sample.frozen_groups)
                if self.lora:
                    model = add_unloaded_adapters(model, self.lora, exclude_modules=exclude_modules)
                return model.to(self.dtype) if self.uniform_dtype else model
        except (ValueError, KeyError, AttributeError, ArithmeticError, RuntimeError, TypeError) as error:
            raise ModelError(f"a {config.model_type} model cannot be built from its config: {error}") from error

    @cached_property
    def full_model(self) -> Any:
        """The model with all layers, cached because building it takes a second; do not modify it."""
        return self.build()


def measure_shape(architecture: Architecture) -> ModelShape:
    """Return parameter counts and bytes of the full model. Tied parameters count once. Raises ModelError."""
    model = architecture.full_model
    trained_weights = [p for p in model.parameters() if p.requires_grad]
    frozen_weights = [p for p in model.parameters() if not p.requires_grad]
    quantized_ids = {id(weight) for weight in _find_quantized_weights(architecture)}
    layers = [sum(p.numel() for p in layer.parameters()) for layer in _find_decoder_layers(architecture)]
    return ModelShape(
        parameters=sum(p.numel() for p in (*trained_weights, *frozen_weights)),
        trained_parameters=sum(p.numel() for p in trained_weights),
        frozen_bytes=sum(_compute_nf4_bytes(p) if id(p) in quantized_ids else p.nbytes for p in frozen_weights),
        trained_bytes=sum(p.nbytes for p in trained_weights),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        has_adapters=architecture.lora is not None,
        layer_parameters=max(layers, default=0),
        outer_parameters=sum(p.numel() for p in (*trained_weights, *frozen_weights)) - sum(layers),
        largest_parameter=max((p.numel() for p in trained_weights), default=0),
        largest_weight_bytes=max((p.nbytes for p in (*trained_weights, *frozen_weights)), default=0),
    )


def count_eight_bit_moment_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of both moments of 8-bit AdamW, with a float32 scale per block of 256 elements.

    bitsandbytes keeps small tensors in float32, and transformers asks it to do so for embeddings.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return sum(
        ADAMW_STATES * 4 * weight.numel()
        if weight.numel() < _SMALLEST_EIGHT_BIT_SIZE or id(weight) in embeddings
        else ADAMW_STATES * (weight.numel() + 4 * -(-weight.numel() // _EIGHT_BIT_BLOCK_SIZE))
        for weight in model.parameters()
        if weight.requires_grad
    )


def measure_step_peak(architecture: Architecture, step: SimulatedStep) -> ActivationMemory:
    """Return the activation memory at the peak of a step. Raises ModelError.

    Equal layers, of the language model as of the vision tower, are simulated in truncated models, and the result is
    extrapolated to all of them. Each model has as many layers as the full one after whole periods of recomputed layers.
    """
    period = step.recomputation_interval or 1
    layers = _count_layers(architecture.config) if _has_equal_layers(architecture) else 0
    vision = architecture.vision_sample and architecture.vision_sample.vision
    tower_layers = find_equal_tower_layers(architecture.full_model, vision) if vision else None
    base, periods = _truncate(layers, period)
    tower_base, tower_periods = _truncate(len(tower_layers or ()), period)
    base_peaks = peaks = _simulate(architecture, step, base, tower_base)
    if base is not None:
        next_peaks = _simulate(architecture, step, base + period, tower_base)
        peaks = {phase: _extrapolate(peaks[phase], base_peaks[phase], next_peaks[phase], periods) for phase in peaks}
    if tower_base is not None:
        next_peaks = _simulate(architecture, step, base, tower_base + period)
        peaks = {
            phase: _extrapolate(peaks[phase], base_peaks[phase], next_peaks[phase], tower_periods) for phase in peaks
        }
    # bitsandbytes dequantizes one weight at a time for its matrix product.
    dequantized_bytes = max((weight.nbytes for weight in _find_quantized_weights(architecture)), default=0)
    for phase in (StepPhase.FORWARD, StepPhase.LAYERS):
        peaks[phase] = replace(peaks[phase], activations=peaks[phase].activations + dequantized_bytes)
    return max(peaks.values(), key=lambda peak: peak.total)


def _find_quantized_weights(architecture: Architecture) -> list[torch.Tensor]:
    """Return the weights that are stored in 4 bits: frozen linear layers of the language model, except the output."""
    if not architecture.is_quantized:
        return []
    output = architecture.full_model.get_output_embeddings()
    linear = (module for module in _iterate_language_modules(architecture) if isinstance(module, torch.nn.Linear))
    return [module.weight for module in linear if module is not output and not module.weight.requires_grad]


def _compute_nf4_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of an NF4 weight with double quantization.

    Each element needs half a byte, each block of 64 elements one 8-bit constant, and 256 constants share a float32.
    """
    return int(weight.numel() * (0.5 + 1 / 64 + 4 / (64 * 256)))


def _truncate(layers: int, period: int) -> tuple[int | None, int]:
    """Return the smallest number of layers to simulate, and how many periods are missing; None if all are simulated."""
    base = _FEWEST_LAYERS + (layers - _FEWEST_LAYERS) % period
    return (None, 0) if layers <= base + period else (base, (layers - base) // period)


def _extrapolate(
    peak: ActivationMemory, base_peak: ActivationMemory, next_peak: ActivationMemory, periods: int
) -> ActivationMemory:
    """Add to a peak what `periods` periods of layers need, by which two models differ once."""
    return ActivationMemory(
        peak.activations + periods * (next_peak.activations - base_peak.activations),
        peak.logits + periods * (next_peak.logits - base_peak.logits),
    )


def _simulate(
    architecture: Architecture, step: SimulatedStep, layers: int | None, tower_layers: int | None
) -> dict[StepPhase, ActivationMemory]:
    model = architecture.build(layers=layers)
    if tower_layers is not None and architecture.vision_sample:
        tower = find_equal_tower_layers(model, architecture.vision_sample.vision)
        assert tower is not None  # callers found it in the full model
        del tower[tower_layers:]
    try:
        if architecture.vision_sample is None:
            with FakeTensorMode(), use_portable_experts():
                replace_meta_tensors(model)
                return simulate_step(model, step)
        inputs = architecture.vision_sample.build_batch(step.batch)
        vision_tower = architecture.vision_sample.vision.family.vision_prefix
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, ConcreteIntegerMode(fake), use_portable_experts():
            replace_meta_tensors(model)
            pixels = {name: fake.from_tensor(value) for name, value in inputs.items() if value.is_floating_point()}
            return simulate_step(model, step, MultimodalBatch({**inputs, **pixels}, vision_tower))
    except Exception as error:  # any model code may fail on fake tensors; callers continue without a forecast
        raise ModelError(
            f"the activations of a {architecture.config.model_type} model cannot be forecast: {first_line(error)}"
        ) from error


def _choose_simulated_option(config: PretrainedConfig, attention: str) -> str | dict[str, str]:
    """Return the argument attn_implementation of transformers, with SDPA for all fused implementations.

    varlen applies to the text part only, so that towers may have no SDPA.
    """
    return select_text_attention(config, SDPA) if attention == VARLEN else attention


def _count_layers(config: PretrainedConfig) -> int:
    return int(config.get_text_config().num_hidden_layers)


def _find_decoder_layers(architecture: Architecture) -> list[Any]:
    """Return the decoder layers: the ModuleList with num_hidden_layers modules; an empty list if there is none."""
    count = _count_layers(architecture.config)
    lists = (module for module in _iterate_language_modules(architecture) if isinstance(module, torch.nn.ModuleList))
    return next((list(layers) for layers in lists if len(layers) == count), [])


def _iterate_language_modules(architecture: Architecture) -> Iterator[torch.nn.Module]:
    """Yield all modules except those of towers and their aligners."""
    family = architecture.vision_sample.vision.family if architecture.vision_sample else None
    for name, module in architecture.full_model.named_modules():
        is_frozen = is_inside(name.removeprefix(PEFT_PREFIX), architecture.frozen_modules)
        if not is_frozen and (family is None or find_group(name, family) == "language"):
            yield module


def _has_equal_layers(architecture: Architecture) -> bool:
    """Return whether all layers have equal parameter shapes and equal values in per-layer config fields."""
    text = architecture.config.get_text_config()
    if any(len({repr(value) for value in getattr(text, name)}) > 1 for name in find_per_layer_fields(text)):
        return False
    layers = [
        Counter((tuple(p.shape), p.dtype) for p in layer.parameters()) for layer in _find_decoder_layers(architecture)
    ]
    return bool(layers) and all(layer == layers[0] for layer in layers)
