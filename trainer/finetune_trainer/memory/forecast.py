"""Forecast the memory of a job from its spec and its model's config."""

from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from finetune_api.batch import Batch
from finetune_api.v1alpha1.devices import count_devices
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.training import EIGHT_BIT_ADAMW
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.memory.breakdown import (
    MemoryBreakdown,
    RankLayout,
    break_down_node_memory,
    break_down_rank_memory,
)
from finetune_trainer.memory.fake_step import SimulatedStep
from finetune_trainer.memory.fused_kernels import MaskUse
from finetune_trainer.memory.model_shape import (
    Architecture,
    ModelShape,
    count_eight_bit_moment_bytes,
    measure_shape,
    measure_step_peak,
)
from finetune_trainer.memory.sharded import build_sharding_strategy
from finetune_trainer.memory.vision_sample import VisionSample, build_blank_sample
from finetune_trainer.model.attention_backend import SDPA, choose_simulated_attention
from finetune_trainer.model.load import (
    choose_dtype,
    choose_reference_dtype,
    choose_training_dtype,
    describe_model,
    max_length,
    read_config,
)
from finetune_trainer.model.lora import trains_biases
from finetune_trainer.model.quantization import check_quantizable
from finetune_trainer.model.supported_types import check_router_loss, find_frozen_modules
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.parallel.autocast_layers import iterate_autocast_layers
from finetune_trainer.parallel.parallelism import saves_asynchronously
from finetune_trainer.training_arguments import MAX_LOADER_WORKERS
from finetune_trainer.training_plan import TrainingPlan
from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.freeze import resolve_frozen_groups
from finetune_trainer.vision.processor import VisionProcessor
from finetune_trainer.vision.video_processor import Features


@dataclass(frozen=True)
class ForecastModel:
    """Model config and processor, which are read once and reused for variants of a spec."""

    config: PretrainedConfig
    dtype: torch.dtype  # dtype of the published result
    vision: VisionProcessor | None = None  # None for a text model
    attention: str = SDPA  # eager, varlen, or SDPA for other fused implementations
    frozen_modules: tuple[str, ...] = ()  # modules that text does not reach (spec.model.textOnly)


@dataclass(frozen=True)
class Forecast:
    """Forecast peak memory of a rank and of a node, with the inputs of the forecast."""

    shape: ModelShape
    batch: Batch
    length: int  # tokens per sample
    rank: MemoryBreakdown
    node: MemoryBreakdown
    on_gpu: bool
    is_multimodal: bool = False  # True: samples cannot be shorter than their images


def read_model(spec: TrainerSpec) -> ForecastModel:
    """Read config.json and, for a vision-language model, tokenizer and processor. Raises TrainerError.

    Does not check whether a device supports the model's dtype.
    """
    config, no_device = read_config(spec.model), torch.device("meta")
    attention = choose_simulated_attention(spec, config)
    if config.model_type in FAMILIES and not spec.model.text_only:
        model_description = describe_model(spec.model, no_device)
        return ForecastModel(model_description.config, model_description.dtype, model_description.vision, attention)
    return ForecastModel(
        config,
        choose_dtype(spec.model, config, no_device),
        attention=attention,
        frozen_modules=find_frozen_modules(spec.model, config),
    )


def forecast(
    plan: TrainingPlan,
    model: ForecastModel,
    *,
    on_gpu: bool,
    max_sample_length: int | None = None,
    sample: Features | None = None,
) -> Forecast:
    """Forecast the job's peak memory. Raises TrainerError.

    max_sample_length: in tokens, by default the maximum in the spec.
    sample: the largest sample of a vision-language model, by default one image of the maximum size.
    """
    # Resolve sharding and dtypes as the trainer does.
    spec = plan.spec
    length = max_sample_length or _resolve_sample_length(spec, model.config)
    sharding = build_sharding_strategy(spec, model.dtype, hidden_size=model.config.get_text_config().hidden_size)
    dtype = model.dtype if sharding else choose_training_dtype(model.dtype, lora=spec.lora is not None)
    vision_sample = None
    if model.vision:
        sample = sample or build_blank_sample(model.vision, length)
        vision_sample = VisionSample(model.vision, resolve_frozen_groups(spec.model.freeze), sample)
    check_router_loss(spec, model.config)
    if spec.lora and spec.lora.quantization:
        check_quantizable(spec.model.name, model.config)
    # Measure the model states and the peak of a step without allocating tensors.
    uniform_dtype = sharding is not None
    architecture = Architecture(
        model.config,
        dtype,
        spec.lora,
        uniform_dtype=uniform_dtype,
        vision_sample=vision_sample,
        attention=model.attention,
        frozen_modules=model.frozen_modules,
    )
    measured_shape = measure_shape(architecture)
    uses_eight_bits = spec.training.optim == EIGHT_BIT_ADAMW
    publishes_model = spec.lora is None or spec.lora.merge
    shape = replace(
        measured_shape,
        eight_bit_moment_bytes=count_eight_bit_moment_bytes(architecture.full_model) if uses_eight_bits else 0,
        published_bytes=measured_shape.parameters * model.dtype.itemsize if publishes_model else 0,
        reference_bytes=_compute_reference_bytes(spec, model, architecture),
        # until its release, the reference model needs less memory than the optimizer states do later
        releases_reference=spec.dpo is not None and spec.dpo.precompute_ref_log_probs,
    )
    # With sharding or a float32 model, the weights already have the compute dtype.
    needs_autocast = sharding is None and model.dtype is not torch.float32
    autocast = model.dtype if needs_autocast else None
    peak = max(
        (measure_step_peak(architecture, step) for step in _build_steps(plan, model, length, autocast)),
        key=lambda peak: peak.total,
    )
    # Break down the memory of a rank and of a node.
    loader_workers = MAX_LOADER_WORKERS if spec.dataset.num_workers is None else spec.dataset.num_workers
    layout = RankLayout(
        spec.world_size, spec.ranks_per_node, loader_workers, on_gpu, sharding, saves_asynchronously(spec)
    )
    rank = break_down_rank_memory(shape, peak, layout)
    node = break_down_node_memory(shape, rank, layout)
    return Forecast(shape, plan.batch, length, rank, node, on_gpu, is_multimodal=vision_sample is not None)


def has_gpu_limits(spec: TrainerSpec) -> bool:
    """Return whether the job's limits contain GPUs or other compute devices, or its container claims some."""
    return count_devices(spec.resources.limits) > 0 or bool(spec.resources.claims)


def choose_mask_use(spec: TrainerSpec, model: ForecastModel) -> MaskUse:
    """Return when attention gets a mask, as the layout of the trainer's micro-batches determines it."""
    if model.attention == VARLEN:
        return MaskUse.NEVER
    if spec.dataset.packing:
        return MaskUse.PACKS
    has_masked_padding = model.vision is not None or spec.training.router_aux_loss_coef is not None
    return MaskUse.PADDED_ROWS if has_masked_padding else MaskUse.WINDOWS


def _build_steps(
    plan: TrainingPlan, model: ForecastModel, length: int, autocast: torch.dtype | None
) -> list[SimulatedStep]:
    """Return a training step and, if the evaluation batch is larger, an evaluation step."""
    spec, batch = plan.spec, plan.batch
    # A DPO row has two sequences. The forward pass of the reference model needs less memory than a training step.
    sequences = 1 if spec.dpo is None else 2
    train = SimulatedStep(
        batch=sequences * batch.micro_batch_size,
        length=length,
        recomputation_interval=spec.training.recomputation_interval,
        autocast=autocast,
        mask_use=choose_mask_use(spec, model),
        has_router_loss=spec.training.router_aux_loss_coef is not None,
    )
    eval_per_device = plan.eval_batch.micro_batch_size
    if not spec.dataset.has_evaluation or eval_per_device <= batch.micro_batch_size:
        return [train]
    return [train, replace(train, batch=sequences * eval_per_device, recomputation_interval=None, is_training=False)]


def _compute_reference_bytes(spec: TrainerSpec, model: ForecastModel, trained: Architecture) -> int:
    """Return the bytes of DPO's reference model; 0 if it is the policy with another adapter, or without adapters."""
    if spec.dpo is None or (spec.lora is not None and not trains_biases(trained.full_model)):
        return 0
    dtype = choose_reference_dtype(spec, model.dtype)
    architecture = trained if spec.lora else replace(trained, dtype=dtype, frozen_modules=())
    shape = measure_shape(architecture)
    layers = iterate_autocast_layers(architecture.full_model)
    cast = 0 if spec.lora else sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    saved_bytes = cast * (dtype.itemsize - model.dtype.itemsize)
    return shape.trained_bytes + shape.frozen_bytes + shape.buffer_bytes - saved_bytes


def _resolve_sample_length(spec: TrainerSpec, config: PretrainedConfig) -> int:
    length = spec.dataset.max_length or max_length(config)
    if length is None:
        raise InvalidSpec(
            f'spec.dataset.maxLength: the config of model "{spec.model.name}" has no max_position_embeddings; set'
            " maxLength, or memory cannot be forecast"
        )
    return length
