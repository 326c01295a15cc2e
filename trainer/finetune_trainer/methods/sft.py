"""Supervised fine-tuning: cross entropy on the tokens to learn, averaged over the whole effective batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from finetune_api.batch import Batch
from finetune_trainer.checkpoint import Checkpoints, random_state, random_state_file, restore_random_state
from finetune_trainer.data.batches import Batches, load_batches
from finetune_trainer.data.load import Data
from finetune_trainer.data.tokens import IGNORED, Features
from finetune_trainer.errors import CheckpointCorrupt
from finetune_trainer.model.load import pad_token_id
from finetune_trainer.ranks import Ranks, gather_on_rank_zero, on_rank_zero, sum_over_ranks
from finetune_trainer.reporting import Reporter
from finetune_trainer.supervisor import contract


@dataclass(frozen=True)
class Parts:
    """What a trainer is built from."""

    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase
    data: Data
    batch: Batch
    eval_batch: Batch
    args: TrainingArguments
    ranks: Ranks
    checkpoints: Checkpoints
    reporter: Reporter
    stop_requested: Callable[[], bool]


@dataclass(frozen=True)
class StepCounts:
    """What all ranks together put into the present optimizer step."""

    targets: int
    tokens: int


class SftTrainer(Trainer):  # type: ignore[misc]
    """transformers' loop with our order of samples, our loss, our evaluation and our checkpoints."""

    state: TrainerState
    control: TrainerControl

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.step_counts = StepCounts(0, 0)
        self.stop_agreed = False
        super().__init__(
            model=parts.model,
            args=parts.args,
            train_dataset=parts.data.train,
            eval_dataset=parts.data.eval,
            processing_class=parts.tokenizer,
            compute_loss_func=target_loss,
        )
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> Batches:
        """Not through accelerate, whose sharding depends on the layout."""
        return load_batches(
            self.parts.data.train,
            self.parts.batch,
            rank=self.parts.ranks.rank,
            seed=self.args.seed,
            pad_id=pad_token_id(self.parts.tokenizer),
            workers=self.args.dataloader_num_workers,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Features], num_batches: int, device: torch.device
    ) -> tuple[list[Features], torch.Tensor]:
        """The micro-batches of one step and the number of targets that its loss is divided by.

        Whether somebody asked to stop travels with the counts that the ranks exchange anyway: all learn it in the same
        step, and end after it.
        """
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        mine = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        targets, all_tokens, stops = sum_over_ranks((mine, tokens, int(self.parts.stop_requested())), device)
        self.step_counts = StepCounts(targets, all_tokens)
        self.stop_agreed = stops > 0
        counted = targets if self.args.average_tokens_across_devices else mine
        return batches, torch.tensor(max(counted, 1), device=device)  # a rank may hold nothing but fillers

    def loss_is_finite(self) -> bool:
        return bool(torch.isfinite(self._tr_loss))

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The loss of the mean token over all evaluation samples, each counted once."""
        self.parts.reporter.enter(contract.EVAL)
        metrics = {"eval_loss": self._evaluation_loss()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.parts.reporter.enter(contract.TRAIN)
        return metrics

    @torch.no_grad()
    def _evaluation_loss(self) -> float:
        assert self.parts.data.eval is not None  # else nobody asks
        batches = load_batches(
            self.parts.data.eval,
            self.parts.eval_batch,
            rank=self.parts.ranks.rank,
            seed=None,
            pad_id=pad_token_id(self.parts.tokenizer),
            workers=0,
        )
        self.model.eval()
        summed = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for batch in batches:
            inputs = self._prepare_inputs(batch)
            labels = inputs.pop("labels")
            summed[0] += summed_loss(self.model(**inputs).logits, labels)
            summed[1] += (labels[:, 1:] != IGNORED).sum()
            self.parts.reporter.alive()
        torch.distributed.all_reduce(summed)
        return float(summed[0] / summed[1])

    def _save_checkpoint(self, _model: torch.nn.Module, _trial: object) -> None:
        """Rank 0 writes everything, the states of all ranks' generators included, so one rename publishes it."""
        self.parts.reporter.enter(contract.SAVE)
        self.store_flos()
        states = gather_on_rank_zero(random_state())
        step, world_size = self.state.global_step, self.parts.ranks.world_size
        name = on_rank_zero(
            lambda: self.parts.checkpoints.save(step, world_size, lambda folder: self._write_checkpoint(folder, states))
        )
        self.parts.reporter.saved(name)
        self.parts.reporter.enter(contract.TRAIN)

    def _write_checkpoint(self, folder: Path, states: list[dict[str, Any]]) -> None:
        save_weights(self.model, folder)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")
        self._save_scaler(str(folder))
        self.state.save_to_json(str(folder / "trainer_state.json"))
        for rank, state in enumerate(states):
            torch.save(state, random_state_file(folder, rank))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Absent where the checkpoint had fewer ranks; then dropout alone goes another way."""
        if checkpoint is None:
            return
        path = random_state_file(Path(checkpoint), self.parts.ranks.rank)
        if path.is_file():
            restore_random_state(torch.load(path, weights_only=True))

    def load_checkpoint(self, checkpoint: Path) -> None:
        """The weights alone, for a run whose steps were all done when it ended."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = type(self.state).load_from_json(str(checkpoint / "trainer_state.json"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointCorrupt(
                f"{resume_from_checkpoint} cannot be loaded ({error}); delete it to resume from the one before"
            ) from error


def target_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """This micro-batch's share of the step's mean loss. Ours, because not every model divides by the given count."""
    return summed_loss(outputs.logits, labels) / num_items_in_batch


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the targets, added up. Only their logits are widened to float32: prompts cost no memory."""
    targets = labels[:, 1:]
    learned = targets != IGNORED
    return torch.nn.functional.cross_entropy(logits[:, :-1][learned].float(), targets[learned], reduction="sum")


def save_weights(model: Any, folder: Path) -> None:
    """In the format of transformers or peft."""
    if hasattr(model, "peft_config"):
        model.save_pretrained(folder, save_embedding_layers=False)  # "auto" would ask the Hub
    else:
        model.save_pretrained(folder)
