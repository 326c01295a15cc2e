"""Report training progress after every step in the heartbeat and the log."""

import time
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_supervisor import contract
from finetune_supervisor.messages import Degradation
from finetune_trainer.cluster_check.degradations import DATA_BOUND
from finetune_trainer.errors import Degraded
from finetune_trainer.metrics.log_line import format_log_line
from finetune_trainer.metrics.throughput import DATA_BOUND_SHARE, CrossRankSummary, describe_speed
from finetune_trainer.training.base_trainer import GlobalMeanTrainer

_STEPS_BEFORE_WARNING = 3
_ZERO_STEPS = 20  # steps with a value of exactly zero after which nothing seems to be learned
_ZERO_REASONS = {"loss": "ZeroLoss", "grad_norm": "ZeroGradient"}
_ZERO_CAUSES = "rows without targets, frozen parameters (model.freeze, lora.targetModules), float16, or lossType hinge"


class ProgressCallback(TrainerCallback):  # type: ignore[misc]
    """Reports progress to the heartbeat on every rank and to the log on rank 0."""

    def __init__(self, trainer: GlobalMeanTrainer, *, verbose: bool) -> None:
        self._trainer = trainer
        self._heartbeat = trainer.inputs.heartbeat
        self._verbose = verbose
        self._started_at = 0.0
        self._steps = 0
        self._zero_since: dict[str, int] = {}  # step of the first of consecutive logs with a value of zero

    def on_train_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        self._started_at = time.monotonic()
        self._heartbeat.enter_phase(contract.TRAIN)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Refresh the heartbeat after a micro-batch, because a step with many micro-batches may take minutes."""
        self._heartbeat.touch()

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        self._steps += 1
        self._trainer.monitor.meter.end_step(state.global_step)
        seconds = max(time.monotonic() - self._started_at, 1e-9)
        remaining_steps = state.max_steps - state.global_step
        self._heartbeat.update_progress(
            replace(
                self._heartbeat.progress,
                step=state.global_step,
                epoch=state.epoch,
                eta_seconds=round(remaining_steps * seconds / self._steps),
            )
        )

    def on_log(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        _control: TrainerControl,
        logs: dict[str, float],
        **_: Any,
    ) -> None:
        if "loss" not in logs:
            return
        monitor = self._trainer.monitor
        assert monitor.latest_summary is not None  # GlobalMeanTrainer.log gathers a summary before it calls on_log
        progress = replace(
            self._heartbeat.progress,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
            **describe_speed(monitor.latest_summary),
            slow_rank=str(monitor.slow_rank) if monitor.slow_rank else None,
            memory=replace(monitor.latest_summary.memory, forecast=self._trainer.inputs.forecast_bytes),
        )
        own_seconds = monitor.own_step_seconds[self._trainer.inputs.ranks.rank]
        self._heartbeat.update_measurements(progress, own_step_seconds=own_seconds)
        if self._verbose:
            print(format_log_line(progress, logs), flush=True)
        self._check_data_wait(monitor.latest_summary)
        self._check_zeros(logs, step=state.global_step)

    def _check_data_wait(self, summary: CrossRankSummary) -> None:
        """Report that steps wait for data, except for the first steps, during which the loader workers start."""
        if summary.data_wait_share <= DATA_BOUND_SHARE or self._steps < _STEPS_BEFORE_WARNING:
            return
        workers = self._trainer.args.dataloader_num_workers
        message = (
            f"{summary.data_wait_share:.0%} of a step is spent waiting for the next batch; raise dataset.numWorkers"
            f" (now {workers} per rank) or the pod's CPUs, or put the rows on faster storage"
        )
        self._report(Degradation(DATA_BOUND, message))

    def _check_zeros(self, logs: dict[str, float], *, step: int) -> None:
        """Report that the loss or the gradient norm has been exactly zero for many steps."""
        for name, reason in _ZERO_REASONS.items():
            if logs.get(name) != 0.0:
                self._zero_since.pop(name, None)
            elif (steps := step - self._zero_since.setdefault(name, step)) >= _ZERO_STEPS:
                message = f"{name} has been exactly 0 for {steps} steps; likely causes: {_ZERO_CAUSES}"
                self._report(Degradation(reason, message))

    def _report(self, degradation: Degradation) -> None:
        """Report a degradation once. Raises: Degraded, on every rank, if spec.training.onDegraded is fail."""
        if any(each.reason == degradation.reason for each in self._heartbeat.degraded):
            return
        self._heartbeat.record_degradations((degradation,))
        line = f"{degradation.reason}: {degradation.message}"
        if self._verbose:
            print(f"warning: degraded: {line}", flush=True)
        if self._trainer.inputs.plan.spec.training.on_degraded == "fail":
            raise Degraded(line)

    def on_evaluate(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        _control: TrainerControl,
        metrics: dict[str, float],
        **_: Any,
    ) -> None:
        self._heartbeat.update_progress(replace(self._heartbeat.progress, eval_loss=metrics["eval_loss"]))
        if self._verbose:
            print(f"step {state.global_step}/{state.max_steps}  eval_loss {metrics['eval_loss']:.4f}", flush=True)
