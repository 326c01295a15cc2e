"""Classifies keys of messages and columns of rows that contain nothing to train on here.

Keys that other tools use for text, media or loss weights are errors, because training without them would give another
result. All other unknown keys are metadata, which is counted in the log (decisions/518).
"""

from collections.abc import Collection, Iterator, Mapping

from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

_WRITE_WEIGHT = "write it as weight, from 0 to 1"
_WRITE_REASONING = "write it as reasoning_content"
_WRITE_MEDIA = "write it as a content part, or into a column of the row"
_NO_AUDIO = "audio is not supported; remove it"
_REFUSED_KEYS = {
    "function_call": "write it as tool_calls",
    "tools": "write it into the column tools of the row",
    "chat_template_kwargs": "write it into the column chat_template_kwargs of the row",
    "refusal": "write it as content",
    **dict.fromkeys(("loss", "loss_scale", "train", "training", "trainable", "train_detail"), _WRITE_WEIGHT),
    **dict.fromkeys(("thoughts", "thought", "reasoning_details", "thinking_blocks"), _WRITE_REASONING),
    **dict.fromkeys(("image", "images", "video", "videos"), _WRITE_MEDIA),
    **dict.fromkeys(("audio", "audios"), _NO_AUDIO),
}
_REFUSED_COLUMNS = {
    "functions": "write it as tools",
    "function_call": "write it as tool_calls of a message",
    "tool_calls": "write it as tool_calls of a message",
    **dict.fromkeys(("audio", "audios"), _NO_AUDIO),
}


def find_ignored_keys(location: str, message: Mapping[str, object], known: Collection[str]) -> tuple[str, ...]:
    """Return the keys with a value that are not known. Raises: DatasetError for a key that must not be ignored."""
    ignored = tuple(key for key, value in message.items() if key not in known and has_value(value))
    for key in ignored:
        if remedy := _REFUSED_KEYS.get(key):
            raise DatasetError(f"{location}.{key}: is not supported; {remedy}")
    return ignored


def describe_ignored_columns(row: Row) -> Iterator[str]:
    """Yield a note per column that resembles a key of a message. Raises: DatasetError if it must not be ignored."""
    for name, remedy in _REFUSED_COLUMNS.items():
        if has_value(row.columns.get(name)):
            raise DatasetError(f"{row.origin}, column {name}: is not supported; {remedy}")
    for name in REASONING_KEYS:
        if has_value(row.columns.get(name)):
            yield f'column "{name}" beside the messages is ignored'


def has_value(value: object) -> bool:
    """Return whether a value is neither null nor an empty text, list or object."""
    return value is not None and value not in ("", [], {})
