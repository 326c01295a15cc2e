"""The memory of a job, from its spec and its model's config."""

from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.memory.breakdown import Layout, Parts, node_parts, rank_parts
from finetune_trainer.memory.fake_step import Step, loss_of_every_token
from finetune_trainer.memory.model_shape import Architecture, ModelShape, measure_shape, measure_step
from finetune_trainer.memory.sharded import spread_of
from finetune_trainer.memory.vision_sample import Sight, blank_sample
from finetune_trainer.model.load import choose_dtype, describe_model, max_length, read_config, training_dtype
from finetune_trainer.model.lora import shape_of
from finetune_trainer.training_arguments import MOST_LOADERS, plan_batch, plan_eval_batch
from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.freeze import frozen_groups
from finetune_trainer.vision.processor import Vision
from finetune_trainer.vision.video_processor import Features


@dataclass(frozen=True)
class Model:
    """What is read once and stays the same when a spec is varied."""

    config: PretrainedConfig
    dtype: torch.dtype  # of the result
    vision: Vision | None = None  # of a model that sees


@dataclass(frozen=True)
class Forecast:
    """What is needed, and of what it was computed."""

    shape: ModelShape
    batch: Batch
    length: int
    rank: Parts
    node: Parts
    on_gpu: bool
    sees: bool = False  # so that samples cannot be as short as one likes


def read_model(spec: TrainerSpec) -> Model:
    """Raises TrainerError. No device is asked whether it computes in the model's type.

    Of a model that only reads, config.json is enough; of one that sees, tokenizer and processor are read, too.
    """
    config, no_device = read_config(spec.model), torch.device("meta")
    if config.model_type in FAMILIES:
        found = describe_model(spec.model, no_device)
        return Model(found.config, found.dtype, found.vision)
    return Model(config, choose_dtype(spec.model, config, no_device))


def forecast(
    spec: TrainerSpec, model: Model, *, on_gpu: bool, longest: int | None = None, sample: Features | None = None
) -> Forecast:
    """For samples of the spec's greatest length, or of the `longest` there is. Raises TrainerError.

    A model that sees is shown the `sample`, or one image, as large as the length and the processor let it be.
    """
    batch = plan_batch(spec, world_size=spec.world_size)
    length = longest or _greatest_length(spec, model.config)
    lora = shape_of(spec.lora) if spec.lora else None
    spread = spread_of(spec, model.dtype, hidden_size=model.config.get_text_config().hidden_size)
    dtype = model.dtype if spread else training_dtype(model.dtype, lora=lora is not None)
    sight = None
    if model.vision:
        sample = sample or blank_sample(model.vision, length)
        sight = Sight(model.vision, frozen_groups(spec.model.freeze), sample)
    architecture = Architecture(model.config, dtype, lora, pure=spread is not None, sight=sight)
    shape = replace(measure_shape(architecture), reference_bytes=_reference_bytes(spec, model, sight))
    autocast = None if spread or model.dtype is torch.float32 else model.dtype  # else all is of that type already
    live = max(
        (measure_step(architecture, step) for step in _steps(spec, batch, length, autocast)),
        key=lambda live: live.total,
    )
    loaders = MOST_LOADERS if spec.dataset.num_workers is None else spec.dataset.num_workers
    layout = Layout(spec.world_size, spec.ranks_per_node, loaders, on_gpu, spread)
    rank = rank_parts(shape, live, layout)
    return Forecast(shape, batch, length, rank, node_parts(shape, rank, layout), on_gpu, sees=sight is not None)


def uses_gpus(spec: TrainerSpec) -> bool:
    return any(name.endswith("/gpu") for name in spec.resources.limits)


def _steps(spec: TrainerSpec, batch: Batch, length: int, autocast: torch.dtype | None) -> list[Step]:
    """A training step and, where its batch is larger, one of evaluation."""
    sequences = 1 if spec.dpo is None else 2  # of a row; the reference needs less for them than the policy
    train = Step(
        batch=sequences * batch.per_device,
        length=length,
        checkpointing=spec.training.gradient_checkpointing,
        autocast=autocast,
        loss=loss_of_every_token,
        packed=spec.dataset.packing,
    )
    evaluated = plan_eval_batch(spec, batch).per_device
    if not spec.dataset.evaluates or evaluated <= batch.per_device:
        return [train]
    return [train, replace(train, batch=sequences * evaluated, checkpointing=False, learns=False)]


def _reference_bytes(spec: TrainerSpec, model: Model, sight: Sight | None) -> int:
    """Of the frozen copy that full tuning by DPO is compared with; with LoRA it is the model without its adapters."""
    if spec.dpo is None or spec.lora is not None:
        return 0
    shape = measure_shape(Architecture(model.config, model.dtype, lora=None, sight=sight))
    return shape.trained_bytes + shape.frozen_bytes + shape.buffer_bytes


def _greatest_length(spec: TrainerSpec, config: PretrainedConfig) -> int:
    length = spec.dataset.max_length or max_length(config)
    if length is None:
        raise InvalidSpec(
            f'spec.dataset.maxLength: model "{spec.model.name}" does not say how long samples may be; set it, or'
            " memory cannot be forecast"
        )
    return length
