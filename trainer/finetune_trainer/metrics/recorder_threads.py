"""Passes the events of the training to trackers in threads (decisions/710)."""

import copy
from collections.abc import Mapping
from functools import partial, partialmethod
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_supervisor.background_tasks import BackgroundTasks
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter

FINISH_SECONDS = 5.0  # time limit of the last events, after the last step


class RecorderThreads(TrainerCallback):  # type: ignore[misc]
    """Runs each callback in a thread; its first error is reported under its name in log and status."""

    def __init__(self, callbacks: Mapping[str, TrainerCallback], heartbeat: HeartbeatWriter) -> None:
        self._recorders = [(name, callback, BackgroundTasks(name)) for name, callback in callbacks.items()]
        self._heartbeat = heartbeat

    def _pass(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **values: Any
    ) -> None:
        state = copy.copy(state)  # training changes the state before the thread reads it
        for name, callback, tasks in self._recorders:
            tasks.add(partial(getattr(callback, event), args, state, control, **values))
            if event == "on_train_end":
                self._heartbeat.touch()
                tasks.finish(FINISH_SECONDS)
            if tasks.problem:  # reported here, because the main thread writes the heartbeats
                self._heartbeat.report_unrecorded(name, tasks.problem)

    on_train_begin = partialmethod(_pass, "on_train_begin")
    on_step_end = partialmethod(_pass, "on_step_end")
    on_log = partialmethod(_pass, "on_log")
    on_save = partialmethod(_pass, "on_save")
    on_train_end = partialmethod(_pass, "on_train_end")
