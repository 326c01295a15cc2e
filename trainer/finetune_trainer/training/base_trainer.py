"""transformers' loop with our order of samples, averaging, evaluation and checkpoints; a method adds its loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import PreTrainedTokenizerBase, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from finetune_api.batch import Batch
from finetune_api.learning_rates import Rates
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_supervisor import contract
from finetune_trainer.checkpoint.checkpoints import (
    Checkpoints,
    random_state,
    random_state_file,
    restore_random_state,
    step_of,
)
from finetune_trainer.data.batch_sampler import Batches, BatchSampler, Collate, load_batches
from finetune_trainer.data.epoch_order import RowOrder
from finetune_trainer.data.load import Data
from finetune_trainer.data.token_dataset import Features
from finetune_trainer.distributed.collectives import Ranks, gather_on_rank_zero, on_rank_zero, sum_over_ranks
from finetune_trainer.distributed.heartbeat_writer import Reporter
from finetune_trainer.errors import CheckpointCorrupt
from finetune_trainer.memory.oom_message import out_of_memory
from finetune_trainer.metrics.flops import measure_work, peak_flops
from finetune_trainer.metrics.monitor import Monitor
from finetune_trainer.metrics.throughput import Meter
from finetune_trainer.model.lora import TRAINED
from finetune_trainer.model.param_groups import parameter_groups
from finetune_trainer.parallel.fsdp import reshard, spread_on_cpu
from finetune_trainer.parallel.full_state import (
    UNREADABLE,
    Replicated,
    Spread,
    gather_state,
    named_trained,
    restore_state,
    weights_in,
    write_state,
)
from finetune_trainer.training.early_stopping import Comparison
from finetune_trainer.vision.families import Family

_STATE = "trainer_state.json"
_UNITS = "units"


@dataclass(frozen=True)
class Parts:
    """What a trainer is built from."""

    spec: TrainerSpec
    model: torch.nn.Module
    reference: torch.nn.Module | None  # of DPO, where the model without adapters is none
    tokenizer: PreTrainedTokenizerBase
    data: Data
    collate: Collate
    family: Family | None  # of a model that sees
    rates: Rates
    batch: Batch
    eval_batch: Batch
    args: TrainingArguments
    ranks: Ranks
    checkpoints: Checkpoints
    reporter: Reporter
    stop_requested: Callable[[], bool]
    expected_memory: int | None  # bytes per rank, as rank 0 forecasts them


class ExactTrainer(Trainer):  # type: ignore[misc]
    """A step's loss is the mean over all units of the effective batch, whatever rank and micro-batch they are in.

    A method says what its units are (`count`) and how their losses add up (`summed_losses`). It may have terms with
    units of their own, such as pairs and tokens: both give one number per term, and the loss is the sum of the means.
    What else it wants to log it adds up with `tally`.
    """

    state: TrainerState
    control: TrainerControl
    optimizer: Any
    loss_is_scaled_for_ga = True

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.comparison = Comparison.of(parts.spec.training)
        self.stop_agreed = False
        self._tallied: dict[str, torch.Tensor] = {}
        spread_on_cpu(parts.args)
        super().__init__(
            model=parts.model,
            args=parts.args,
            train_dataset=parts.data.train,
            eval_dataset=parts.data.eval,
            processing_class=parts.tokenizer,
        )
        spread = self.accelerator.distributed_type is DistributedType.FSDP
        assert parts.ranks.world_size == 1 or spread == bool(parts.args.fsdp), "accelerate took another way to spread"
        self.remove_callback(PrinterCallback)
        self.monitor = self._build_monitor()

    def _build_monitor(self) -> Monitor:
        """Before the model is wrapped or spread."""
        dpo, device = self.parts.spec.dpo is not None, self.args.device
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        meter = Meter(measure_work(self.parts.model, has_reference=dpo), sequences=2 if dpo else 1, on_gpu=on_gpu)
        peak = peak_flops(torch.cuda.get_device_name(device), dtype) if on_gpu else None
        return Monitor(meter, device=device, peak_flops=peak)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """transformers' own, unless parts of the model have learning rates of their own."""
        parts = self.parts
        if parts.family is not None and parts.rates.own and self.optimizer is None:
            model = model or self.model
            groups = parameter_groups(
                model,
                parts.family,
                parts.rates,
                decayed=self.get_decay_parameter_names(model),
                weight_decay=self.args.weight_decay,
            )
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = kind(groups, **options)
        created: torch.optim.Optimizer = super().create_optimizer(model)
        return created

    def count(self, batch: Features) -> tuple[float, ...]:
        """Units of a micro-batch, term by term."""
        raise NotImplementedError

    def summed_losses(self, model: torch.nn.Module, batch: Features) -> tuple[torch.Tensor, ...]:
        """The losses of the units of a micro-batch, added up, term by term."""
        raise NotImplementedError

    def tally(self, units: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
        """Sums over units; what is logged under each name is the mean over all units since the last log line."""
        for name, value in {**sums, _UNITS: units}.items():
            self._tallied[name] = self._tallied.get(name, 0) + value.detach().double()

    def get_train_dataloader(self) -> Batches:
        """Not through accelerate, whose sharding depends on the layout."""
        parts, workers = self.parts, self.args.dataloader_num_workers
        sampler = BatchSampler(parts.data.order, parts.batch, rank=parts.ranks.rank)
        return load_batches(parts.data.samples, sampler, parts.collate, workers=workers)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Features], num_batches: int, device: torch.device
    ) -> tuple[list[Features], torch.Tensor]:
        """The micro-batches of one step and the numbers of units that the terms of its loss are divided by.

        Whether somebody asked to stop travels with the counts that the ranks exchange anyway: all learn it in the same
        step, and end after it.
        """
        with self.monitor.meter.waiting_for_data():
            batches = [next(epoch_iterator) for _ in range(num_batches)]
        self.monitor.meter.take_in(batches)
        mine = tuple(sum(term) for term in zip(*map(self.count, batches), strict=True))
        *all_units, stops = sum_over_ranks((*mine, self.parts.stop_requested()), device)
        self.stop_agreed = stops > 0
        units = torch.tensor(all_units if self.args.average_tokens_across_devices else mine, device=device)
        return batches, torch.where(units > 0, units, 1.0)  # a rank may hold nothing but fillers

    def training_step(
        self, model: torch.nn.Module, inputs: Features, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        try:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, inputs, step=self.state.global_step) from error
        return loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Features,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """This micro-batch's share of the step's mean loss."""
        assert num_items_in_batch is not None
        assert not return_outputs  # evaluation is ours
        with self.monitor.meter.computing_loss():
            share = (torch.stack(self.summed_losses(model, inputs)) / num_items_in_batch).sum()
        # gradients of the ranks are averaged, but a mean over the units of all ranks is a sum of their shares
        return share * self.parts.ranks.world_size if self.args.average_tokens_across_devices else share

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Nothing of what is done inside is left: no gradient, no tally, no draw from a generator."""
        tallied, drawn = self._tallied, random_state()
        self._tallied = {}
        yield
        self.model.zero_grad(set_to_none=True)
        restore_random_state(drawn)
        self._tallied = tallied

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **self._means(), **self.monitor.exchange().as_log()}
        super().log(logs, start_time)

    def loss_is_finite(self) -> bool:
        return bool(torch.isfinite(self._tr_loss))

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The loss of the mean unit over all evaluation samples, each counted once."""
        self.parts.reporter.enter(contract.EVAL)
        during_training, self._tallied = self._tallied, {}
        metrics = {f"eval_{name}": value for name, value in self._evaluate_all().items()}
        self._tallied = during_training
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.parts.reporter.enter(contract.TRAIN)
        return metrics

    @torch.no_grad()
    def _evaluate_all(self) -> dict[str, float]:
        parts, device = self.parts, self.args.device
        assert parts.data.eval is not None  # else nobody asks
        order = RowOrder(parts.data.eval.lengths, seed=None)
        sampler = BatchSampler(order, parts.eval_batch, rank=parts.ranks.rank)
        batches = load_batches(parts.data.seen(parts.data.eval), sampler, parts.collate, workers=0)
        self.model.eval()
        terms = []
        for batch in batches:
            units = torch.tensor(self.count(batch), dtype=torch.float64, device=device)
            losses = torch.stack(self.summed_losses(self.model, self._prepare_inputs(batch)))
            terms.append(torch.stack((losses.double(), units)))
            parts.reporter.alive()
        summed = torch.stack(terms).sum(dim=0)
        torch.distributed.all_reduce(summed)
        return {"loss": float((summed[0] / summed[1]).sum()), **self._means()}

    def _means(self) -> dict[str, float]:
        """Of what was tallied since the last time, over all ranks; every rank has tallied the same names."""
        if not self._tallied:
            return {}
        names = sorted(self._tallied)
        sums = torch.stack([self._tallied[name] for name in names])
        self._tallied = {}
        torch.distributed.all_reduce(sums)
        means = dict(zip(names, sums.tolist(), strict=True))
        units = max(means.pop(_UNITS), 1.0)
        return {name: value / units for name, value in means.items()}

    def _save_checkpoint(self, _model: torch.nn.Module, _trial: object) -> None:
        """Rank 0 writes everything, the states of all ranks' generators included, so one rename publishes it."""
        self.parts.reporter.enter(contract.SAVE)
        self.store_flos()
        random_states = gather_on_rank_zero(random_state())
        learned = gather_state(self.model, self._spread(), keep=self.parts.ranks.is_first)
        step, world_size = self.state.global_step, self.parts.ranks.world_size
        spared = self.comparison.best_step(self.state.log_history) if self.comparison else None

        def write(folder: Path) -> None:
            write_state(learned, folder)
            if hasattr(self.model, "peft_config"):  # so that peft can load it as it is
                self.save_result(weights_in(learned), folder)
            torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")
            self._save_scaler(str(folder))
            self.state.save_to_json(str(folder / _STATE))
            for rank, state in enumerate(random_states):
                torch.save(state, random_state_file(folder, rank))

        name = on_rank_zero(lambda: self.parts.checkpoints.save(step, world_size, write, spared=spared))
        self.parts.reporter.saved(name)
        self.parts.reporter.enter(contract.TRAIN)

    def _spread(self) -> Spread:
        if self.is_deepspeed_enabled:
            from finetune_trainer.parallel.deepspeed_zero import Zero  # takes seconds to import

            return Zero(self.model_wrapped)
        reshard(self.model)
        return Replicated(self.optimizer)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Of everything that the result holds, by name, on rank 0; every rank has to ask."""
        spread = self._spread()
        wanted = named_trained(self.model) if hasattr(self.model, "peft_config") else self.model.named_parameters()
        found = ((name, spread.weight(parameter)) for name, parameter in wanted)
        return {name: weight for name, weight in found if self.parts.ranks.is_first}

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Batches, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, Batches]:
        """Ours reads a checkpoint for every way of spreading; transformers has one for each."""
        prepared: tuple[torch.nn.Module, Batches] = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            self._restore(Path(resume_from_checkpoint))
        return prepared

    def _restore(self, checkpoint: Path) -> None:
        try:
            restore_state(self.model, self._spread(), checkpoint, step=step_of(checkpoint))
            scheduler = torch.load(checkpoint / "scheduler.pt", weights_only=True)
            self.lr_scheduler.load_state_dict(scheduler)
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate  # which the scheduler sets at its next step only
        except UNREADABLE as error:
            raise CheckpointCorrupt(
                f"{checkpoint} cannot be loaded ({error}); delete it to resume from the one before"
            ) from error
        self._load_scaler(str(checkpoint))

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
        """Nothing yet: `_restore` does it once the model is spread."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Absent where the checkpoint had fewer ranks; then dropout alone goes another way."""
        if checkpoint is None:
            return
        path = random_state_file(Path(checkpoint), self.parts.ranks.rank)
        if path.is_file():
            restore_random_state(torch.load(path, weights_only=True))

    @property
    def is_done(self) -> bool:
        """By its steps, or because it ran out of patience."""
        return self.state.global_step >= self.args.max_steps or self._is_out_of_patience(self.state)

    def was_done(self, checkpoint: Path) -> bool:
        """When it was saved."""
        if step_of(checkpoint) >= self.args.max_steps:
            return True
        return self._is_out_of_patience(TrainerState.load_from_json(str(checkpoint / _STATE)))

    def _is_out_of_patience(self, state: TrainerState) -> bool:
        return self.comparison is not None and self.comparison.is_out_of_patience(state.log_history)

    def load_checkpoint(self, checkpoint: Path) -> None:
        """Of a run that was done when it ended: transformers would train one step more."""
        self._prepare_for_training(self.args.max_steps, self.get_train_dataloader(), str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / _STATE))

    def save_result(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        """In the format of transformers or peft."""
        if not hasattr(self.model, "peft_config"):
            self.model.to(next(iter(weights.values())).dtype).save_pretrained(folder, state_dict=weights)
            return
        # the Hub would be asked whether the embedding was changed
        options = {"save_embedding_layers": False, "selected_adapters": [TRAINED]}
        self.model.save_pretrained(folder, state_dict=weights, **options)
