"""Subclass of the transformers Trainer with its own sample order, loss averaging, evaluation and checkpoints.

Each training method is a subclass that adds its loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import SchedulerType, Trainer, TrainerControl, TrainerState
from transformers.trainer_callback import PrinterCallback

from finetune_api.v1alpha1.training import EIGHT_BIT_ADAMW
from finetune_supervisor import contract
from finetune_trainer.checkpoint.random_state import random_state, restore_random_state
from finetune_trainer.data.batch_sampler import BatchSampler, RankDataLoader, build_dataloader
from finetune_trainer.data.load import SampleDataset
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.memory.oom_message import build_out_of_memory_error
from finetune_trainer.metrics.monitor import build_monitor
from finetune_trainer.model.param_groups import build_parameter_groups, keep_embedding_moments_in_float32
from finetune_trainer.parallel.fsdp import (
    enable_fsdp_on_cpu,
    protect_buffers,
    protect_tied_weights,
    reduce_gradients_in_float32,
    select_sharded_layers,
)
from finetune_trainer.parallel.parallelism import saves_asynchronously
from finetune_trainer.training.checkpoint_saver import CheckpointSaver
from finetune_trainer.training.checkpoint_state import (
    describe_save,
    load_trainer_state,
    restore_checkpoint,
    restore_rank_random_state,
    stage_checkpoint,
)
from finetune_trainer.training.early_stopping import EvaluationPolicy
from finetune_trainer.training.evaluation import LossSums, compute_evaluation_loss
from finetune_trainer.training.loss_averaging import MetricSums, compute_divisors
from finetune_trainer.training.trainer_inputs import TrainerInputs

_LAST_POLYNOMIAL_RATE = 1e-7  # as in transformers


class GlobalMeanTrainer(Trainer):  # type: ignore[misc]
    """Trainer whose loss is the mean over all loss units of the effective batch.

    The mean does not depend on how ranks and micro-batches divide the effective batch. A subclass defines its loss
    units (`count_loss_units`) and sums their losses (`sum_losses`). A loss may have several terms with different
    units, such as pairs and tokens: both methods return one value per term, and the loss is the sum of their means.
    `accumulate_metrics` collects further values to log.
    """

    state: TrainerState
    control: TrainerControl
    optimizer: Any
    loss_is_scaled_for_ga = True

    def __init__(self, inputs: TrainerInputs) -> None:
        self.inputs = inputs
        self.evaluation_policy = EvaluationPolicy.from_training(inputs.plan.spec.training)
        self.stop_agreed = False  # True: all ranks agreed to stop, because one received a stop request
        self.metric_sums = MetricSums()
        self.checkpoint_saver = CheckpointSaver(inputs.checkpoints)
        enable_fsdp_on_cpu(inputs.args)
        super().__init__(
            model=inputs.model,
            args=inputs.args,
            train_dataset=inputs.data.train,
            eval_dataset=inputs.data.eval,
            processing_class=inputs.tokenizer,
        )
        uses_fsdp = self.accelerator.distributed_type is DistributedType.FSDP
        assert inputs.ranks.world_size == 1 or uses_fsdp == bool(inputs.args.fsdp), "accelerate ignored args.fsdp"
        if uses_fsdp:
            reduce_gradients_in_float32(self.accelerator)
            select_sharded_layers(inputs.model, self.accelerator)
        elif inputs.ranks.world_size == 1 and self.accelerator.distributed_type is DistributedType.MULTI_CPU:
            # On a CPU, accelerate would wrap the model by DDP also for one rank.
            self.accelerator.state.distributed_type = DistributedType.NO
        self.remove_callback(PrinterCallback)
        self.monitor = build_monitor(
            inputs.model, self.args, inputs.plan.spec.dpo, unused_modules=inputs.frozen_modules
        )

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, with parameter groups if modules of the model have different learning rates."""
        inputs = self.inputs
        if inputs.family is not None and inputs.plan.learning_rates.part_rates and self.optimizer is None:
            model = model or self.model
            groups = build_parameter_groups(
                model,
                inputs.family,
                inputs.plan.learning_rates,
                decayed_names=self.get_decay_parameter_names(model),
                weight_decay=self.args.weight_decay,
            )
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = optimizer_class(groups, **options)
            if self.args.optim == EIGHT_BIT_ADAMW:
                keep_embedding_moments_in_float32(model)
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Create the learning rate schedule.

        The polynomial one of transformers divides by the number of steps after the warm-up, which may be 0, and needs
        the attribute `defaults`, which optimizers of DeepSpeed lack.
        """
        if self.args.lr_scheduler_type != SchedulerType.POLYNOMIAL:
            scheduler: LRScheduler = super().create_scheduler(num_training_steps, optimizer)
            return scheduler
        warmup_steps: int = self.args.get_warmup_steps(num_training_steps)
        last_factor: float = min(_LAST_POLYNOMIAL_RATE / self.args.learning_rate, 1.0)

        def compute_factor(step: int) -> float:
            if step < warmup_steps:
                return step / warmup_steps
            remaining = max(num_training_steps - step, 0) / max(num_training_steps - warmup_steps, 1)
            return last_factor + (1 - last_factor) * remaining

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, compute_factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def count_loss_units(self, batch: MicroBatch) -> tuple[float, ...]:
        """Return the number of loss units in a micro-batch, one value per loss term."""
        raise NotImplementedError

    def sum_losses(self, model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Return the summed loss of all units of a micro-batch, one scalar per loss term."""
        raise NotImplementedError

    def accumulate_metrics(self, units: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
        """Add metric sums over `units` loss units to the next log entry, which contains the means per unit."""
        self.metric_sums.add(units, sums)

    @property
    def train_samples(self) -> SampleDataset:
        """Training dataset, indexed by the items of the sample order."""
        return self.inputs.data.samples

    @property
    def eval_samples(self) -> SampleDataset:
        """Evaluation dataset, indexed by rows."""
        assert self.inputs.data.eval is not None  # transformers evaluates only if there is an evaluation dataset
        return self.inputs.data.add_pixel_inputs(self.inputs.data.eval)

    def get_train_dataloader(self) -> RankDataLoader:
        """Return this rank's data loader; the sample order of accelerate's data loader depends on the batch split."""
        inputs, count = self.inputs, self.args.dataloader_num_workers
        sampler = BatchSampler(inputs.data.order, inputs.plan.batch, rank=inputs.ranks.rank)
        return build_dataloader(
            self.train_samples, sampler, inputs.collate, skips=inputs.data.skips, worker_count=count, is_persistent=True
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[MicroBatch], num_batches: int, _device: torch.device
    ) -> tuple[list[MicroBatch], torch.Tensor]:
        """Return the micro-batches of one step and the divisor of each loss term, shape (terms,); set `stop_agreed`."""
        if self.checkpoint_saver.is_complete:
            self.finish_save()
        if (source_check := self.inputs.data.source_check) and source_check.done():
            source_check.result()  # raises an error if rows have changed
        with self.monitor.meter.measure_data_wait():
            micro_batches = [next(epoch_iterator) for _ in range(num_batches)]
        for micro_batch in micro_batches:
            self.inputs.data.skips.report(micro_batch)
        self.monitor.meter.add_micro_batches(micro_batches)
        divisors, self.stop_agreed = compute_divisors(
            [self.count_loss_units(micro_batch) for micro_batch in micro_batches],
            across_ranks=self.args.average_tokens_across_devices,
            stop_requested=self.inputs.is_stop_requested(),
        )
        return micro_batches, divisors

    def training_step(
        self, model: torch.nn.Module, inputs: MicroBatch, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the forward and backward pass of a micro-batch. Raises CudaOutOfMemory, with the micro-batch size."""
        try:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError as error:
            raise build_out_of_memory_error(error, inputs, step=self.state.global_step) from error
        return loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the contribution of this micro-batch to the mean loss of the step, a scalar."""
        assert num_items_in_batch is not None
        assert not return_outputs  # only transformers' evaluation loop needs outputs; `evaluate` replaces it
        with self.monitor.meter.measure_loss():
            losses, divisors = self.sum_losses(model, inputs), num_items_in_batch.tolist()
            contribution = torch.stack([loss / divisor for loss, divisor in zip(losses, divisors, strict=True)]).sum()
        # Gradients are averaged over the ranks, but with a global divisor the contributions must be summed.
        return contribution * self.inputs.ranks.world_size if self.args.average_tokens_across_devices else contribution

    @contextmanager
    def discard_side_effects(self) -> Iterator[None]:
        """Discard gradients and metrics of the `with` block, and restore the random number generators afterwards."""
        generator_states = random_state()
        with self.metric_sums.reset_temporarily():
            yield
            self.model.zero_grad(set_to_none=True)
        restore_random_state(generator_states)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log an entry; add accumulated metrics and throughput to an entry with a training loss."""
        if "loss" in logs:
            logs = {**logs, **self.metric_sums.reduce_means(), **self.monitor.gather_summary().to_log_values()}
        super().log(logs, start_time)

    def is_loss_finite(self) -> bool:
        """Return whether this rank's loss since the last log entry is finite."""
        return bool(torch.isfinite(self._tr_loss))

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return the mean loss per unit over all evaluation samples, each counted once, and the mean metrics."""
        self.inputs.heartbeat.enter_phase(contract.EVAL)
        self.model.eval()
        with self.metric_sums.reset_temporarily():
            means = {"loss": compute_evaluation_loss(self.inputs, self.eval_samples, self._sum_micro_batch)}
            means |= self.metric_sums.reduce_means()
        metrics = {f"eval_{name}": value for name, value in means.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.inputs.heartbeat.enter_phase(contract.TRAIN)
        return metrics

    def _sum_micro_batch(self, batch: MicroBatch) -> LossSums:
        """Return the summed losses and the unit counts of a micro-batch."""
        losses = torch.stack(self.sum_losses(self.model, self._prepare_inputs(batch)))
        return LossSums(losses.double(), self.count_loss_units(batch))

    def _prepare_inputs(self, inputs: MicroBatch) -> MicroBatch:
        """Move a micro-batch to the device.

        With DeepSpeed, transformers would round all floats to 16 bits, also the weights of targets.
        """
        dtype = self.accelerator.state.deepspeed_plugin.hf_ds_config.dtype() if self.is_deepspeed_enabled else None
        return inputs.to(self.args.device, pixel_dtype=dtype)

    def floating_point_ops(self, _inputs: MicroBatch) -> int:
        """Return 0: `monitor` counts FLOPs, and transformers would iterate over all parameters in each micro-batch."""
        return 0

    def _save_checkpoint(self, _model: torch.nn.Module, _trial: object) -> None:
        """Start to save a checkpoint; the checkpoint of the best evaluation is never pruned."""
        self.inputs.heartbeat.enter_phase(contract.SAVE)
        self.finish_save()
        policy, is_asynchronous = self.evaluation_policy, saves_asynchronously(self.inputs.plan.spec)
        best_step = policy.find_best_step(self.state.log_history) if policy else None
        part = stage_checkpoint(self, self.inputs, copies_state=is_asynchronous, retained_step=best_step)
        self.checkpoint_saver.start(part)
        if not is_asynchronous:
            self.finish_save()
        self.inputs.heartbeat.enter_phase(contract.TRAIN)

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being saved, if any, and report it. Raises: DiskFull or OutputError."""
        if saved := self.checkpoint_saver.wait():
            heartbeat = self.inputs.heartbeat
            heartbeat.record_progress(replace(heartbeat.progress, last_checkpoint=saved.name))
            if self.inputs.ranks.is_rank_zero:
                grace_seconds = self.inputs.plan.spec.termination_grace_period_seconds
                print(describe_save(saved, grace_seconds=grace_seconds), flush=True)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: RankDataLoader, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, RankDataLoader]:
        """Prepare the model and data loader, then restore the checkpoint into the wrapped and sharded model."""
        with protect_buffers(self.model), protect_tied_weights(self.model):
            prepared: tuple[torch.nn.Module, RankDataLoader] = super()._prepare_for_training(
                max_steps, train_dataloader, None
            )
        if resume_from_checkpoint is not None:
            restore_checkpoint(self, Path(resume_from_checkpoint))
        return prepared

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
        """Do nothing: transformers calls this before sharding; `_prepare_for_training` restores the checkpoint."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this rank's random generators."""
        if checkpoint is not None:
            restore_rank_random_state(Path(checkpoint), rank=self.inputs.ranks.rank)

    @property
    def is_finished(self) -> bool:
        """Whether training completed all steps or stopped early."""
        return self._is_final_state(self.state)

    def is_final_checkpoint(self, checkpoint: Path) -> bool:
        """Return whether training was finished when the checkpoint was saved."""
        return self._is_final_state(load_trainer_state(checkpoint))

    def _is_final_state(self, state: TrainerState) -> bool:
        policy = self.evaluation_policy
        stopped_early = policy is not None and policy.should_stop_early(state.log_history)
        return stopped_early or bool(state.global_step >= self.args.max_steps)

    def load_final_checkpoint(self, checkpoint: Path) -> None:
        """Load the checkpoint of a finished run without training; transformers would train one more step."""
        self._prepare_for_training(self.args.max_steps, self.get_train_dataloader(), str(checkpoint))
        self.state = load_trainer_state(checkpoint)
