"""What happens between steps: progress is told, a stop request obeyed, a loss that is no number refused."""

import time
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import Memory, Progress
from finetune_trainer.errors import NonFiniteLoss
from finetune_trainer.memory.gpus import GIB
from finetune_trainer.metrics.cross_rank import DATA_BOUND, Peaks, Summary
from finetune_trainer.training.base_trainer import ExactTrainer
from finetune_trainer.training.early_stopping import Comparison, Standing

_STEPS_BEFORE_WARNING = 3


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


class FollowEvaluations(TrainerCallback):  # type: ignore[misc]
    """Save what is better than all before. End when patience does, with a checkpoint, after which nobody trains on."""

    def __init__(self, trainer: ExactTrainer, comparison: Comparison) -> None:
        self._reporter = trainer.parts.reporter
        self._prints = trainer.parts.ranks.is_first
        self._comparison = comparison

    def on_train_begin(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        self._tell_best(self._comparison.standing(state.log_history))

    def on_evaluate(self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        standing = self._comparison.standing(state.log_history)
        self._tell_best(standing)
        if best := standing.best:
            state.best_global_step, state.best_metric = best.step, best.value  # for those who read the file
            control.should_save |= self._comparison.publishes_best and best.step == state.global_step
        if self._comparison.is_out_of_patience(state.log_history):
            control.should_save = control.should_training_stop = True
        if self._prints:
            print(standing_line(state, standing, self._comparison), flush=True)

    def _tell_best(self, standing: Standing) -> None:
        if best := standing.best:
            self._reporter.report(replace(self._reporter.progress, best_step=best.step, best_metric=best.value))


class TellProgress(TrainerCallback):  # type: ignore[misc]
    """To the heartbeat on every rank, to the log on rank 0."""

    def __init__(self, trainer: ExactTrainer, *, prints: bool) -> None:
        self._trainer = trainer
        self._reporter = trainer.parts.reporter
        self._prints = prints
        self._began = 0.0
        self._steps = 0
        self._warned = False

    def on_train_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        self._began = time.monotonic()
        self._reporter.enter(contract.TRAIN)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """A micro-batch is done: with much accumulation a step may take minutes."""
        self._reporter.alive()

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        self._steps += 1
        self._trainer.monitor.meter.end_step(state.global_step)
        seconds = max(time.monotonic() - self._began, 1e-9)
        left = state.max_steps - state.global_step
        self._reporter.report(
            replace(
                self._reporter.progress,
                step=state.global_step,
                epoch=state.epoch,
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
        monitor = self._trainer.monitor
        assert monitor.latest is not None  # the trainer measures before it logs
        progress = replace(
            self._reporter.progress,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
            **describe_speed(monitor.latest),
            slow_rank=str(monitor.slow) if monitor.slow else None,
            memory=describe_memory(monitor.latest.memory, forecast=self._trainer.parts.expected_memory),
        )
        own_seconds = monitor.own_seconds[self._trainer.parts.ranks.rank]
        self._reporter.measured(progress, own_step_seconds=own_seconds)
        if self._prints:
            print(log_line(progress, logs), flush=True)
            self._warn(monitor.latest)

    def _warn(self, measured: Summary) -> None:
        """Once; the first step also waits for the loaders to start."""
        if measured.data_wait_share <= DATA_BOUND or self._warned or self._steps < _STEPS_BEFORE_WARNING:
            return
        self._warned = True
        workers = self._trainer.args.dataloader_num_workers
        print(
            f"warning: {measured.data_wait_share:.0%} of a step is spent waiting for the next batch; raise"
            f" dataset.numWorkers (now {workers} per rank) or the pod's CPUs, or put the rows on faster storage",
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


def standing_line(state: TrainerState, standing: Standing, comparison: Comparison) -> str:
    best = standing.best
    facts = [
        f"step {state.global_step}/{state.max_steps}",
        f"best {comparison.metric} {best.value:.4f} at step {best.step}" if best else f"no {comparison.metric} yet",
        f"waited {standing.waited} of {comparison.patience} evaluations" if comparison.patience else "",
    ]
    return "  ".join(fact for fact in facts if fact)


def describe_speed(measured: Summary) -> dict[str, Any]:
    """As fields of Progress."""
    names = ("tokens_per_second", "samples_per_second", "step_seconds", "mfu", "data_wait_share")
    return {name: measured.as_log().get(name) for name in names}


def describe_memory(measured: Peaks, *, forecast: int | None) -> Memory:
    return Memory(
        forecast=forecast,
        peak_highest=measured.highest,
        peak_highest_rank=measured.highest_rank,
        peak_lowest=measured.lowest,
        peak_lowest_rank=measured.lowest_rank,
        reserved=measured.reserved or None,
        cause=f"step {measured.step}, longest sequence {measured.longest} tokens",
    )


def log_line(progress: Progress, logs: dict[str, float]) -> str:
    """One line of the log: what is learned first, then how fast, then what a method adds."""
    facts = [
        f"step {progress.step}/{progress.total_steps}",
        f"loss {logs['loss']:.4f}",
        f"grad_norm {logs.get('grad_norm', 0.0):.4f}",
        f"lr {logs.get('learning_rate', 0.0):.3e}",
        f"{progress.step_seconds or 0:.3g} s/step",
        f"tokens/s {progress.tokens_per_second or 0:.0f}",
        f"samples/s {progress.samples_per_second or 0:.3g}",
        f"mfu {progress.mfu:.1%}" if progress.mfu is not None else "",
        f"data {progress.data_wait_share or 0:.0%}",
        f"memory {progress.memory.peak_highest / GIB:.2f} GiB" if progress.memory else "",
        f"slowest {progress.slow_rank}" if progress.slow_rank else "",
        f"eta {_clock(progress.eta_seconds or 0)}",
        *(f"{name} {value:.4f}" for name, value in logs.items() if "/" in name),
    ]
    return "  ".join(fact for fact in facts if fact)


def _clock(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
