"""What happens between steps: progress is told, a stop request obeyed, a loss that is no number refused."""

import time
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_trainer.errors import NonFiniteLoss
from finetune_trainer.methods.exact import ExactTrainer
from finetune_trainer.reporting import Reporter
from finetune_trainer.supervisor import contract


class RefuseNonFiniteLoss(TrainerCallback):  # type: ignore[misc]
    """Before anything is logged or saved of that step. The rank that sees it ends the job; the others wait for it."""

    def __init__(self, trainer: ExactTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        if not self._trainer.loss_is_finite():
            raise NonFiniteLoss(
                f"the loss is not finite at step {state.global_step}; lower training.learningRate, add"
                " training.warmupSteps, or look for broken rows"
            )


class StopWhenAsked(TrainerCallback):  # type: ignore[misc]
    """Save and end after the step in which the ranks agreed to."""

    def __init__(self, trainer: ExactTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, _args: TrainingArguments, _state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._trainer.stop_agreed:
            control.should_save = True
            control.should_training_stop = True


class TellProgress(TrainerCallback):  # type: ignore[misc]
    """To the heartbeat on every rank, to the log on rank 0."""

    def __init__(self, trainer: ExactTrainer, reporter: Reporter, *, prints: bool) -> None:
        self._trainer = trainer
        self._reporter = reporter
        self._prints = prints
        self._began = 0.0
        self._steps = 0
        self._tokens = 0

    def on_train_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        self._began = time.monotonic()
        self._reporter.enter(contract.TRAIN)

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        self._steps += 1
        self._tokens += self._trainer.step_tokens
        seconds = max(time.monotonic() - self._began, 1e-9)
        left = state.max_steps - state.global_step
        self._reporter.report(
            replace(
                self._reporter.progress,
                step=state.global_step,
                epoch=state.epoch,
                tokens_per_second=round(self._tokens / seconds, 1),
                eta_seconds=round(left * seconds / self._steps),
            )
        )

    def on_log(
        self,
        _args: TrainingArguments,
        _state: TrainerState,
        _control: TrainerControl,
        logs: dict[str, float],
        **_: Any,
    ) -> None:
        if "loss" not in logs:
            return
        progress = replace(
            self._reporter.progress,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
        )
        self._reporter.report(progress)
        if self._prints:
            more = "".join(f"  {name} {value:.4f}" for name, value in logs.items() if "/" in name)
            print(
                f"step {progress.step}/{progress.total_steps}  loss {logs['loss']:.4f}"
                f"  grad_norm {logs.get('grad_norm', 0.0):.4f}  lr {logs.get('learning_rate', 0.0):.3e}"
                f"  tokens/s {progress.tokens_per_second or 0:.0f}  eta {_clock(progress.eta_seconds or 0)}{more}",
                flush=True,
            )

    def on_evaluate(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        _control: TrainerControl,
        metrics: dict[str, float],
        **_: Any,
    ) -> None:
        self._reporter.report(replace(self._reporter.progress, eval_loss=metrics["eval_loss"]))
        if self._prints:
            print(f"step {state.global_step}/{state.max_steps}  eval_loss {metrics['eval_loss']:.4f}", flush=True)


def _clock(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
