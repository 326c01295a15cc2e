"""Makes errors that another process or rank raises again, so that their verdict does not depend on the process."""

import pickle
from contextlib import suppress

from finetune_trainer.storage_faults import find_errno, is_storage_fault, to_storage_fault


class UnpicklableError(Exception):
    """Replaces an error that cannot be pickled; a subclass has the name of the error's class."""

    errno: int | None

    def __reduce__(self) -> tuple[object, ...]:
        return _build_replacement, (type(self).__name__, str(self), self.errno)


def to_sendable(error: Exception) -> Exception:
    """Return the error, or one with the same verdict that pickle restores unchanged.

    Causes are not sent. An error that would no longer show that a file system failed becomes a StorageFault.
    """
    with suppress(Exception):  # pickling runs the methods of any class
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  pickled in the same line
        is_same = type(copy) is type(error) and str(copy) == str(error)
        if is_same and is_storage_fault(copy) == is_storage_fault(error):
            return error
    if is_storage_fault(error):
        return to_storage_fault(error)
    replacement = _build_replacement(type(error).__name__, str(error), find_errno(error))
    replacement.__cause__ = error
    return replacement


def _build_replacement(class_name: str, message: str, errno: int | None) -> UnpicklableError:
    return type(class_name, (UnpicklableError,), {"errno": errno})(message)  # type: ignore[no-any-return]
