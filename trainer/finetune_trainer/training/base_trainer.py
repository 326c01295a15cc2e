"""The training loop of transformers with a sample order, loss averaging, evaluation and checkpoints of our own.

Each training method is a subclass that adds its loss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import PreTrainedTokenizerBase, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from finetune_supervisor import contract
from finetune_trainer.checkpoint.checkpoints import (
    Checkpoints,
    checkpoint_step,
    random_state,
    random_state_file,
    restore_random_state,
)
from finetune_trainer.data.batch_sampler import BatchSampler, RankDataLoader, build_dataloader
from finetune_trainer.data.collator import Collate
from finetune_trainer.data.epoch_order import RowOrder
from finetune_trainer.data.load import TrainingData
from finetune_trainer.data.token_dataset import Features
from finetune_trainer.distributed.collectives import gather_on_rank_zero, run_on_rank_zero, sum_over_ranks
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.errors import CheckpointCorrupt
from finetune_trainer.memory.oom_message import build_out_of_memory_error
from finetune_trainer.metrics.flops import estimate_flops, peak_flops
from finetune_trainer.metrics.monitor import Monitor
from finetune_trainer.metrics.step_meter import StepMeter
from finetune_trainer.model.lora import TRAINED_ADAPTER
from finetune_trainer.model.param_groups import build_parameter_groups
from finetune_trainer.parallel.fsdp import enable_fsdp_on_cpu
from finetune_trainer.parallel.full_state import (
    READ_ERRORS,
    extract_weights,
    gather_state,
    restore_state,
    trained_parameters,
    write_state,
)
from finetune_trainer.parallel.state_access import build_state_access
from finetune_trainer.training.early_stopping import EvaluationPolicy
from finetune_trainer.training_plan import TrainingPlan
from finetune_trainer.vision.families import VisionFamily

_STATE_FILE = "trainer_state.json"
_UNITS = "units"


@dataclass(frozen=True)
class TrainerInputs:
    """Everything that a trainer is built from."""

    plan: TrainingPlan
    model: torch.nn.Module
    reference_model: torch.nn.Module | None  # only for DPO without LoRA
    tokenizer: PreTrainedTokenizerBase
    data: TrainingData
    collate: Collate
    family: VisionFamily | None  # None: not a vision-language model
    args: TrainingArguments
    ranks: Ranks
    checkpoints: Checkpoints
    heartbeat: HeartbeatWriter
    stop_requested: Callable[[], bool]
    forecast_bytes: int | None  # forecast peak memory per rank; set on rank 0 only


class GlobalMeanTrainer(Trainer):  # type: ignore[misc]
    """Trainer whose loss is the mean over all loss units of the effective batch.

    The mean does not depend on how ranks and micro-batches divide the effective batch. A subclass defines its loss
    units (`count_loss_units`) and sums their losses (`sum_losses`). A loss may have several terms with units of their
    own, such as pairs and tokens: both methods return one value per term, and the loss is the sum of the terms' means.
    `accumulate_metrics` collects further values to log.
    """

    state: TrainerState
    control: TrainerControl
    optimizer: Any
    loss_is_scaled_for_ga = True

    def __init__(self, inputs: TrainerInputs) -> None:
        self.inputs = inputs
        self.evaluation_policy = EvaluationPolicy.from_training(inputs.plan.spec.training)
        self.stop_agreed = False  # a rank received a stop request, and all ranks know of it
        self._metric_sums: dict[str, torch.Tensor] = {}
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
        self.remove_callback(PrinterCallback)
        self.monitor = self._build_monitor()

    def _build_monitor(self) -> Monitor:
        """Build the monitor; called before the model is wrapped or sharded, which hides the sizes of parameters."""
        is_dpo, device = self.inputs.plan.spec.dpo is not None, self.args.device
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        flops = estimate_flops(self.inputs.model, has_reference=is_dpo)
        meter = StepMeter(flops, sequences=2 if is_dpo else 1, on_gpu=on_gpu)
        peak = peak_flops(torch.cuda.get_device_name(device), dtype) if on_gpu else None
        return Monitor(meter, device=device, peak_flops=peak)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of transformers, with parameter groups if parts have learning rates of their own."""
        inputs = self.inputs
        if inputs.family is not None and inputs.plan.rates.by_part and self.optimizer is None:
            model = model or self.model
            groups = build_parameter_groups(
                model,
                inputs.family,
                inputs.plan.rates,
                decayed=self.get_decay_parameter_names(model),
                weight_decay=self.args.weight_decay,
            )
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = optimizer_class(groups, **options)
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        return optimizer

    def count_loss_units(self, batch: Features) -> tuple[float, ...]:
        """Return the number of loss units in a micro-batch, one value per loss term."""
        raise NotImplementedError

    def sum_losses(self, model: torch.nn.Module, batch: Features) -> tuple[torch.Tensor, ...]:
        """Return the summed loss of all units of a micro-batch, one scalar per loss term."""
        raise NotImplementedError

    def accumulate_metrics(self, units: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
        """Add sums over `units` units; the mean per unit is logged under each name with the next log line."""
        for name, value in {**sums, _UNITS: units}.items():
            self._metric_sums[name] = self._metric_sums.get(name, 0) + value.detach().double()

    def get_train_dataloader(self) -> RankDataLoader:
        """Return this rank's loader; accelerate's sharding is not used, as its sample order depends on the layout."""
        inputs, workers = self.inputs, self.args.dataloader_num_workers
        sampler = BatchSampler(inputs.data.order, inputs.plan.batch, rank=inputs.ranks.rank)
        return build_dataloader(inputs.data.samples, sampler, inputs.collate, workers=workers)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Features], num_batches: int, device: torch.device
    ) -> tuple[list[Features], torch.Tensor]:
        """Return the micro-batches of one step and the divisor of each loss term, shape (terms,).

        The stop request of each rank is summed in the same collective as the unit counts, so that all ranks learn of
        it in the same step and end after it.
        """
        with self.monitor.meter.waiting_for_data():
            micro_batches = [next(epoch_iterator) for _ in range(num_batches)]
        self.monitor.meter.add_micro_batches(micro_batches)
        local_units = tuple(sum(term) for term in zip(*map(self.count_loss_units, micro_batches), strict=True))
        *global_units, stop_requests = sum_over_ranks((*local_units, self.inputs.stop_requested()), device)
        self.stop_agreed = stop_requests > 0
        units = torch.tensor(global_units if self.args.average_tokens_across_devices else local_units, device=device)
        return micro_batches, torch.where(units > 0, units, 1.0)  # a rank may have only fillers, which have no units

    def training_step(
        self, model: torch.nn.Module, inputs: Features, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one micro-batch. Raises CudaOutOfMemory with the size of the micro-batch."""
        try:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError as error:
            raise build_out_of_memory_error(error, inputs, step=self.state.global_step) from error
        return loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Features,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what this micro-batch contributes to the mean loss of the step, a scalar."""
        assert num_items_in_batch is not None
        assert not return_outputs  # only transformers' evaluation loop needs outputs; `evaluate` replaces it
        with self.monitor.meter.computing_loss():
            contribution = (torch.stack(self.sum_losses(model, inputs)) / num_items_in_batch).sum()
        # Gradients are averaged over the ranks, but with a global divisor the contributions must be summed.
        return contribution * self.inputs.ranks.world_size if self.args.average_tokens_across_devices else contribution

    @contextmanager
    def undoing_side_effects(self) -> Iterator[None]:
        """Discard the gradients and metrics of the block, and restore the random number generators after it."""
        metric_sums, generator_states = self._metric_sums, random_state()
        self._metric_sums = {}
        yield
        self.model.zero_grad(set_to_none=True)
        restore_random_state(generator_states)
        self._metric_sums = metric_sums

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the entry; one with a training loss is extended by the accumulated metrics and the throughput."""
        if "loss" in logs:
            logs = {**logs, **self._reduce_metrics(), **self.monitor.gather_summary().as_log()}
        super().log(logs, start_time)

    def is_loss_finite(self) -> bool:
        """Return whether this rank's loss since the last log line is finite."""
        return bool(torch.isfinite(self._tr_loss))

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return the mean loss per unit over all evaluation samples, each counted once, and the mean metrics."""
        self.inputs.heartbeat.enter_phase(contract.EVAL)
        training_metric_sums, self._metric_sums = self._metric_sums, {}
        metrics = {f"eval_{name}": value for name, value in self._evaluate_all().items()}
        self._metric_sums = training_metric_sums
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.inputs.heartbeat.enter_phase(contract.TRAIN)
        return metrics

    @torch.no_grad()
    def _evaluate_all(self) -> dict[str, float]:
        inputs, device = self.inputs, self.args.device
        assert inputs.data.eval is not None  # transformers evaluates only if there is an evaluation dataset
        order = RowOrder(inputs.data.eval.lengths, seed=None)
        sampler = BatchSampler(order, inputs.plan.eval_batch, rank=inputs.ranks.rank)
        micro_batches = build_dataloader(inputs.data.with_pixels(inputs.data.eval), sampler, inputs.collate, workers=0)
        self.model.eval()
        local_sums = []  # (2, terms) per micro-batch: summed losses and units
        for batch in micro_batches:
            units = torch.tensor(self.count_loss_units(batch), dtype=torch.float64, device=device)
            losses = torch.stack(self.sum_losses(self.model, self._prepare_inputs(batch)))
            local_sums.append(torch.stack((losses.double(), units)))
            inputs.heartbeat.touch()
        global_sums = torch.stack(local_sums).sum(dim=0)
        torch.distributed.all_reduce(global_sums)
        global_losses, global_units = global_sums[0], global_sums[1]
        return {"loss": float((global_losses / global_units).sum()), **self._reduce_metrics()}

    def _reduce_metrics(self) -> dict[str, float]:
        """Return the mean metrics over all ranks since the last call. Every rank must have the same names."""
        if not self._metric_sums:
            return {}
        names = sorted(self._metric_sums)
        sums = torch.stack([self._metric_sums[name] for name in names])
        self._metric_sums = {}
        torch.distributed.all_reduce(sums)
        global_sums = dict(zip(names, sums.tolist(), strict=True))
        global_units = max(global_sums.pop(_UNITS), 1.0)
        return {name: value / global_units for name, value in global_sums.items()}

    def _save_checkpoint(self, _model: torch.nn.Module, _trial: object) -> None:
        """Save a checkpoint; rank 0 writes all files, also those of other ranks, so that one rename publishes it."""
        self.inputs.heartbeat.enter_phase(contract.SAVE)
        self.store_flos()
        random_states = gather_on_rank_zero(random_state())
        full_state = gather_state(self.model, build_state_access(self), keep=self.inputs.ranks.is_first)
        step, world_size = self.state.global_step, self.inputs.ranks.world_size
        policy = self.evaluation_policy
        best_step = policy.find_best_step(self.state.log_history) if policy else None

        def write(folder: Path) -> None:
            write_state(full_state, folder)
            if hasattr(self.model, "peft_config"):  # the checkpoint can then be loaded by peft
                self.save_result(extract_weights(full_state), folder)
            torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")
            self._save_scaler(str(folder))
            self.state.save_to_json(str(folder / _STATE_FILE))
            for rank, state in enumerate(random_states):
                torch.save(state, random_state_file(folder, rank))

        name = run_on_rank_zero(lambda: self.inputs.checkpoints.save(step, world_size, write, retained_step=best_step))
        self.inputs.heartbeat.record_checkpoint(name)
        self.inputs.heartbeat.enter_phase(contract.TRAIN)

    def gather_full_weights(self) -> dict[str, torch.Tensor]:
        """Return the full weights of the result by name on rank 0, an empty dict elsewhere; a collective."""
        access = build_state_access(self)
        is_peft = hasattr(self.model, "peft_config")
        parameters = trained_parameters(self.model) if is_peft else self.model.named_parameters()
        full_weights = ((name, access.weight(parameter)) for name, parameter in parameters)
        return {name: weight for name, weight in full_weights if self.inputs.ranks.is_first}

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: RankDataLoader, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, RankDataLoader]:
        """Restore the checkpoint here: one format for all kinds of sharding, where transformers has one for each."""
        prepared: tuple[torch.nn.Module, RankDataLoader] = super()._prepare_for_training(
            max_steps, train_dataloader, None
        )
        if resume_from_checkpoint is not None:
            self._restore(Path(resume_from_checkpoint))
        return prepared

    def _restore(self, checkpoint: Path) -> None:
        try:
            restore_state(self.model, build_state_access(self), checkpoint, step=checkpoint_step(checkpoint))
            scheduler = torch.load(checkpoint / "scheduler.pt", weights_only=True)
            self.lr_scheduler.load_state_dict(scheduler)
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate  # the scheduler itself would set it only after its next step
        except READ_ERRORS as error:
            raise CheckpointCorrupt(
                f"{checkpoint} cannot be loaded ({error}); delete it to resume from the one before"
            ) from error
        self._load_scaler(str(checkpoint))

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
        """Do nothing: transformers calls this before the model is sharded, `_restore` loads it afterwards."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this rank's generators. A rank without a saved state only draws other dropout masks."""
        if checkpoint is None:
            return
        path = random_state_file(Path(checkpoint), self.inputs.ranks.rank)
        if path.is_file():
            restore_random_state(torch.load(path, weights_only=True))

    @property
    def is_finished(self) -> bool:
        """Whether training made all its steps or stopped early."""
        return self.state.global_step >= self.args.max_steps or self._stops_early(self.state)

    def is_final_checkpoint(self, checkpoint: Path) -> bool:
        """Return whether training was finished when the checkpoint was saved."""
        if checkpoint_step(checkpoint) >= self.args.max_steps:
            return True
        return self._stops_early(TrainerState.load_from_json(str(checkpoint / _STATE_FILE)))

    def _stops_early(self, state: TrainerState) -> bool:
        return self.evaluation_policy is not None and self.evaluation_policy.stops_early(state.log_history)

    def load_final_checkpoint(self, checkpoint: Path) -> None:
        """Load the checkpoint of a finished run without training; transformers would train one more step."""
        self._prepare_for_training(self.args.max_steps, self.get_train_dataloader(), str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / _STATE_FILE))

    def save_result(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        """Save full weights as transformers does, or those of the trained adapter as peft does."""
        if not hasattr(self.model, "peft_config"):
            self.model.to(next(iter(weights.values())).dtype).save_pretrained(folder, state_dict=weights)
            return
        # Without save_embedding_layers=False, peft asks the Hub whether the vocabulary was resized.
        options = {"save_embedding_layers": False, "selected_adapters": [TRAINED_ADAPTER]}
        self.model.save_pretrained(folder, state_dict=weights, **options)
