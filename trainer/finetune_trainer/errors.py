"""Errors of the trainer: user errors, such as ModelNotFound, and errors after which a retry may succeed.

The operator uses the class name as the reason. The message addresses the person who can act.
"""

from collections.abc import Iterator


class TrainerError(Exception):
    """Base class of trainer errors; the message names the object and field, the value found and what to do."""


class UserError(TrainerError):
    """Base class of errors that only a change of the job, its data or its storage can fix; they are never retried."""


class InvalidSpec(UserError):
    """The spec contradicts itself, the model or the cluster."""


class DatasetError(UserError):
    """Rows are missing or do not have the expected format."""


class ChatTemplateError(UserError):
    """The tokenizer has no chat template, or it rejects the rows or does not mark the assistant's turns."""


class ModelNotFound(UserError):
    """No model exists at the path or with the name in the spec."""


class ModelError(UserError):
    """The model exists but cannot be trained with this spec."""


class OutputError(UserError):
    """The output belongs to another job or attempt, is not shared by all nodes or cannot be written."""


class CheckpointCorrupt(UserError):
    """Checkpoints exist, but training cannot resume from any of them."""


class WorldSizeMismatch(UserError):
    """The number of started ranks differs from the number that the operator planned."""


class MixedHardware(UserError):
    """Ranks have different devices, drivers or library versions."""


class Degraded(UserError):
    """The job would be slower than its hardware allows, and spec.training.onDegraded is fail."""


class NonFiniteLoss(UserError):
    """The loss became NaN or infinite; a restart from the last checkpoint would reach the same loss."""


class DiskFull(TrainerError):
    """A volume has no space left, or its quota is used up."""


class CudaOutOfMemory(TrainerError):
    """A micro-batch did not fit into GPU memory; a smaller micro-batch may fit."""


class GpuHardware(TrainerError):
    """A GPU reports memory errors or computes incorrectly; another GPU may work."""


class NetworkFault(TrainerError):
    """The connection between ranks corrupts data or is slower than required; another node may work."""


class DriverMismatch(TrainerError):
    """The NVIDIA driver or the GPU is incompatible with torch; another Kubernetes node may have others."""


class GpuUnavailable(TrainerError):
    """The container should have GPUs, but torch finds none that it can use."""


class HubUnavailable(TrainerError):
    """The Hub did not respond; a retry may succeed."""


class StorageFault(TrainerError):
    """A file system failed with an I/O error; a retry may succeed."""


def iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its chain of causes, which is a cycle if a cause was raised again."""
    found = set[int]()
    while error is not None and id(error) not in found:
        found.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]
