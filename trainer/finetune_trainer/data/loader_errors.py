"""Makes the training process raise the errors of the workers of its data loader unchanged."""

import sys
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from multiprocessing.queues import Queue
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker

from finetune_trainer.sent_error import to_sendable


class WorkerError(ExceptionWrapper):
    """Replaces torch's class, which puts the traceback into the message, and loses all attributes and causes."""

    def __init__(self, error: BaseException | None = None, **_: object) -> None:
        error = error or sys.exc_info()[1]
        assert isinstance(error, Exception)
        sendable = to_sendable(error)
        self._error = ExceptionWithTraceback(sendable, sendable.__traceback__)  # pickle restores the error

    def reraise(self) -> NoReturn:
        """Raise the error; called by the data loader in the training process."""
        raise self._error


def send_errors(_worker_id: int) -> None:
    """Make this worker send its errors, also those of the thread that sends its batches, such as a full /dev/shm.

    Python only prints the latter, so that the training process would wait for the batch until the hang timeout.
    """
    worker.ExceptionWrapper = WorkerError  # type: ignore[attr-defined, assignment]
    Queue._on_queue_feeder_error = _send_queue_error  # type: ignore[attr-defined]


def _send_queue_error(queue: "Queue[Any]", error: Exception, task: tuple[int, object]) -> None:
    queue.put((task[0], WorkerError(error)))
