"""Errors of the trainer. The class name is the reason the operator reads, the text is for the person who can act."""

from collections.abc import Iterator


class TrainerError(Exception):
    """Says which object and field, what was seen and what to do."""


class UserError(TrainerError):
    """Only a change of the job, its data or its storage helps: never retried."""


class InvalidSpec(UserError):
    """The job asks for something that cannot be."""


class DatasetError(UserError):
    """Rows are missing or not what they should be."""


class ChatTemplateError(UserError):
    """The tokenizer's chat template is absent, refuses the rows, or hides where the assistant speaks."""


class ModelNotFound(UserError):
    """No model at that path or under that name."""


class ModelError(UserError):
    """There is a model, but not one that can be trained so."""


class OutputError(UserError):
    """The output belongs to another job or attempt, is not shared or cannot be written."""


class CheckpointCorrupt(UserError):
    """Checkpoints are there, and none can be resumed from."""


class WorldSizeMismatch(UserError):
    """Another number of ranks was started than the operator promised."""


class MixedHardware(UserError):
    """Ranks compute on different devices or with different versions."""


class NonFiniteLoss(UserError):
    """The loss became NaN or infinite: training on from the same point would end the same way."""


class DiskFull(TrainerError):
    """A volume has no room left, or its quota is spent."""


class CudaOutOfMemory(TrainerError):
    """A micro-batch did not fit into the GPU's memory; a smaller one may."""


class HubUnavailable(TrainerError):
    """The Hub did not answer; later it may."""


class StorageFault(TrainerError):
    """A file system failed, and what it holds may be read or written later."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised for."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """What another library says, short enough for a message of ours."""
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]
