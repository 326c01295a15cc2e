"""Makes the training process raise the errors of loader workers and tokenizing processes with the same verdict."""

import pickle
import sys
from contextlib import suppress
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from multiprocessing.queues import Queue
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker

from finetune_trainer.errors import StorageFault, first_line
from finetune_trainer.storage_faults import is_storage_fault


class UnpicklableError(Exception):
    """Replaces an error that cannot be pickled; a subclass has the name of the error's class."""

    def __reduce__(self) -> tuple[object, ...]:
        return _build_replacement, (type(self).__name__, str(self))


def to_sendable(error: BaseException) -> BaseException:
    """Return the error, or one with the same verdict that pickle restores unchanged.

    Causes are not sent. An error that would no longer show that a file system failed becomes a StorageFault.
    """
    with suppress(Exception):  # pickling runs the methods of any class
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  pickled in the same line
        is_same = type(copy) is type(error) and str(copy) == str(error)
        if is_same and is_storage_fault(copy) == is_storage_fault(error):
            return error
    if is_storage_fault(error):
        return StorageFault(first_line(error)).with_traceback(error.__traceback__)
    return _build_replacement(type(error).__name__, str(error)).with_traceback(error.__traceback__)


def _build_replacement(class_name: str, message: str) -> UnpicklableError:
    return type(class_name, (UnpicklableError,), {})(message)  # type: ignore[no-any-return]


class WorkerError(ExceptionWrapper):
    """Replaces torch's class, which puts the traceback into the message, and loses all attributes and causes."""

    def __init__(self, **_: object) -> None:
        error = sys.exc_info()[1]
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


def _send_queue_error(queue: "Queue[Any]", _error: Exception, task: tuple[int, object]) -> None:
    queue.put((task[0], WorkerError()))
