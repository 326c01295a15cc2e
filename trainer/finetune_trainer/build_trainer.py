"""Build the trainer of a job: resolve the batch size, load the models, and add collator and callbacks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.cgroup import Cgroup
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.data.collator import Collate, Collator, MultimodalCollator, SequenceLayout
from finetune_trainer.data.load import TrainingData
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.distributed.collectives import run_on_rank_zero
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from finetune_trainer.distributed.rank_context import RankContext
from finetune_trainer.errors import TrainerError
from finetune_trainer.memory.available import gather_min_rank_memory
from finetune_trainer.memory.breakdown import MemoryBreakdown
from finetune_trainer.memory.run_forecast import forecast_rank_memory
from finetune_trainer.methods.dpo import DpoTrainer
from finetune_trainer.methods.sft import SftTrainer
from finetune_trainer.model.attention_backend import SDPA, choose_default_attention
from finetune_trainer.model.compiled_layers import check_compiler, compile_layers
from finetune_trainer.model.load import ModelDescription, get_pad_token_id, load_model, load_reference_model
from finetune_trainer.model.lora import trains_biases
from finetune_trainer.model.param_groups import check_learning_rates
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.model.weight_loading import WeightLoading, choose_weight_loading
from finetune_trainer.startup_log import describe_switching_rope, print_on_rank_zero
from finetune_trainer.training.auto_batch_size import (
    SavedBatchSize,
    build_cache_key,
    can_run_batch_size_trial,
    choose_by_forecast,
    choose_by_trial,
)
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.early_stopping import BestEvaluationCallback
from finetune_trainer.training.preflight import IsolationCallback, PreflightCallback
from finetune_trainer.training.progress_callback import ProgressCallback
from finetune_trainer.training.stop_callbacks import NonFiniteLossCallback, StopRequestCallback
from finetune_trainer.training.trainer_inputs import TrainerInputs
from finetune_trainer.training_arguments import (
    DeviceConfig,
    build_training_arguments,
    choose_loader_workers,
    count_cpus,
)
from finetune_trainer.training_plan import TrainingPlan
from finetune_trainer.vision.freeze import has_trained_vision_weights

BUILDERS: dict[str, Callable[[TrainerInputs], GlobalMeanTrainer]] = {
    "sft": SftTrainer,
    "dpo": DpoTrainer,
}  # a test checks that the keys equal METHODS
PAD_MULTIPLE = 64  # tokens


@dataclass(frozen=True)
class TrainingSetup:
    """Inputs of a trainer other than the plan; they do not depend on the micro-batch size."""

    context: RankContext
    heartbeat: HeartbeatWriter
    device_config: DeviceConfig
    model_description: ModelDescription
    data: TrainingData
    output: OutputFolder


@dataclass(frozen=True)
class ModelPair:
    """The model to train, and DPO's reference model if it is a separate model."""

    trained_model: torch.nn.Module
    reference_model: torch.nn.Module | None


def resolve_auto_batch_size(plan: TrainingPlan, setup: TrainingSetup) -> tuple[TrainingPlan, ModelPair | None]:
    """Resolve the batch size `auto`. Return the new plan, and the models if a trial loaded them."""
    spec, smallest = plan.spec, plan.batch
    if not spec.training.has_auto_batch_size:
        return plan, None
    device, models = setup.device_config.device, None
    # Report the smallest size first, because the trial itself may run out of memory.
    setup.heartbeat.record_batch_size(smallest.micro_batch_size)
    # Reuse the size that an earlier attempt chose.
    saved_batch_size = SavedBatchSize(setup.output, build_cache_key(spec, device, world_size=smallest.world_size))
    choice = run_on_rank_zero(lambda: saved_batch_size.load(smallest))
    # Otherwise try sizes on the GPU, or compare their forecasts with the available memory.
    if choice is None and can_run_batch_size_trial(spec, device):
        trial = assemble_trainer(plan, setup)
        choice = choose_by_trial(trial)
        models = ModelPair(trial.model, trial.inputs.reference_model)
    elif choice is None:
        forecast, available = partial(forecast_batch_memory, plan, setup), gather_min_rank_memory(device)
        choice = run_on_rank_zero(lambda: choose_by_forecast(smallest, forecast, available_bytes=available))
    # Save and report the choice.
    chosen = choice
    run_on_rank_zero(lambda: saved_batch_size.save(chosen))
    setup.heartbeat.record_batch_size(chosen.batch.micro_batch_size)
    print_on_rank_zero(
        setup.context, [f"perDeviceTrainBatchSize auto: {chosen.batch.micro_batch_size}, {chosen.reason}"]
    )
    return plan.with_micro_batch(chosen.batch), models


def forecast_batch_memory(plan: TrainingPlan, setup: TrainingSetup, batch: Batch) -> MemoryBreakdown | TrainerError:
    """Forecast the memory of a rank with this batch; return the error if no forecast is possible."""
    on_gpu = setup.device_config.device.type == "cuda"
    return forecast_rank_memory(plan.with_micro_batch(batch), setup.model_description, setup.data, on_gpu=on_gpu)


def assemble_trainer(
    plan: TrainingPlan,
    setup: TrainingSetup,
    models: ModelPair | None = None,
    *,
    forecast: MemoryBreakdown | TrainerError | None = None,
) -> GlobalMeanTrainer:
    """Build the trainer of the job, and load the models unless they are passed. Raises TrainerError."""
    spec, context, model_description, data = plan.spec, setup.context, setup.model_description, setup.data
    args = build_training_arguments(
        plan,
        setup.device_config,
        checkpoint_folder=setup.output.checkpoints,
        loader_workers=choose_loader_workers(spec, context.ranks, cpus=count_cpus(context.planned_cpus, Cgroup())),
    )
    if spec.training.torch_compile:
        check_compiler(setup.device_config.device)
    # Load the models only now: building the arguments enables ZeRO-3, which shards weights during loading.
    models = models or load_models(spec, model_description, choose_weight_loading(spec, setup.device_config.device))
    family = model_description.vision.family if model_description.vision else None
    device = setup.device_config.device
    layout = choose_sequence_layout(spec, model_description, device)
    check_learning_rates(models.trained_model, family, plan.learning_rates)
    return build_trainer(
        TrainerInputs(
            plan=plan,
            model=models.trained_model,
            reference_model=models.reference_model,
            tokenizer=model_description.tokenizer,
            data=data,
            collate=build_collator(data, model_description, models.trained_model, layout),
            layout=layout,
            padded_layout=choose_padded_layout(spec, model_description, device),
            family=family,
            frozen_modules=model_description.frozen_modules,
            args=args,
            ranks=context.ranks,
            checkpoints=Checkpoints(
                setup.output, spec.training.save_total_limit, setup.heartbeat.touch, rows=data.row_identity
            ),
            heartbeat=setup.heartbeat,
            is_stop_requested=context.run.stop_request.exists,
            forecast_bytes=forecast.total if isinstance(forecast, MemoryBreakdown) else None,
            notes=dict(describe_switching_rope(data, plan.batch, model_description.config)),
        ),
    )


def load_models(spec: TrainerSpec, model_description: ModelDescription, loading: WeightLoading) -> ModelPair:
    """Load the model to train and, if DPO needs one, a separate reference model."""
    trained_model = load_model(spec, model_description, loading)
    needs_reference = spec.dpo is not None and (spec.lora is None or trains_biases(trained_model))
    reference_model = load_reference_model(spec, model_description, loading) if needs_reference else None
    if spec.training.torch_compile:
        for model in filter(None, (trained_model, reference_model)):
            compile_layers(model)
    return ModelPair(trained_model, reference_model)


def build_trainer(inputs: TrainerInputs) -> GlobalMeanTrainer:
    """Build the trainer for the spec's training method and add the callbacks."""
    # A spec has exactly one method.
    method = next(name for name in BUILDERS if getattr(inputs.plan.spec, name) is not None)
    trainer = BUILDERS[method](inputs)
    # The first callback, because DPO's reference may be computed with the layout that the check chooses.
    trainer.callback_handler.callbacks.insert(0, IsolationCallback(trainer))
    trainer.add_callback(PreflightCallback(trainer))
    trainer.add_callback(StopRequestCallback(trainer))
    trainer.add_callback(NonFiniteLossCallback(trainer))  # after the callbacks that request a checkpoint
    trainer.add_callback(ProgressCallback(trainer, verbose=inputs.ranks.is_rank_zero))
    if policy := trainer.evaluation_policy:
        trainer.add_callback(BestEvaluationCallback(policy, inputs.heartbeat, verbose=inputs.ranks.is_rank_zero))
    return trainer


def choose_sequence_layout(
    spec: TrainerSpec, model_description: ModelDescription, device: torch.device
) -> SequenceLayout:
    """Choose the layout of micro-batches that suits the attention implementation.

    Padding on the right needs no mask if attention is causal, and a mask excludes the fastest kernels. The auxiliary
    loss of routers reads it, though, and FlashAttention removes padding by it. On GPUs, some kernels build a plan for
    each new length, so the lengths are rounded up.
    """
    if model_description.attention == VARLEN:
        # The auxiliary loss of routers counts every token of a prompt twice, once for each completion.
        shares_prompts = spec.dpo is not None and spec.training.router_aux_loss_coef is None
        return SequenceLayout(padding_free=True, shares_prompts=shares_prompts)
    is_causal = model_description.attention == SDPA and model_description.vision is None
    return SequenceLayout(
        pad_multiple=PAD_MULTIPLE if device.type == "cuda" else 1,
        masks_padding=not is_causal or spec.training.router_aux_loss_coef is not None,
    )


def choose_padded_layout(
    spec: TrainerSpec, model_description: ModelDescription, device: torch.device
) -> SequenceLayout | None:
    """Choose the layout for a model that fails the check of `varlen`; None unless `auto` chose `varlen`."""
    if model_description.attention != VARLEN or spec.model.attn_implementation != "auto":
        return None
    attention = choose_default_attention(model_description.config)
    return choose_sequence_layout(spec, replace(model_description, attention=attention), device)


def build_collator(
    data: TrainingData, model_description: ModelDescription, model: torch.nn.Module, layout: SequenceLayout
) -> Collate:
    """Build the collator; for a vision-language model it adds dummy media to batches without media.

    Dummy media are needed if the vision tower is trained or other batches contain media. Then every rank must run the
    vision tower in every step, because collectives exchange its gradients or shards.
    """
    pad_id = get_pad_token_id(model_description.tokenizer)
    if model_description.vision is None:
        return Collator(pad_id, layout)
    required_modalities = data.modalities or (
        (Modality.IMAGE,) if has_trained_vision_weights(model, model_description.vision.family) else ()
    )
    return MultimodalCollator(pad_id, layout, model_description.vision, required_modalities=required_modalities)
