"""Converts turns with media to content parts, and expands the placeholders that chat templates render."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from finetune_trainer import cpu_limit
from finetune_trainer.data_sources.media import MEDIA_MARK, MediaItem, Modality
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.errors import DatasetError
from finetune_trainer.vision.processor import VisionProcessor

_PROBE_TEXT = "⟦content⟧"
Span = tuple[int, int]  # (start, end) in characters; the end is exclusive


@dataclass(frozen=True)
class ExpandedText:
    """Rendered conversation with one placeholder token per image or video embedding."""

    text: str
    spans: tuple[Span, ...]  # character ranges of the assistant turns in `text`
    media: tuple[tuple[MediaItem, Span], ...]


def to_content_parts(turn: Turn) -> list[dict[str, str]]:
    """Convert a turn to content parts for the chat template, keeping the order of text and media."""
    parts, media = [], iter(turn.media)
    for piece in re.split(f"({re.escape(MEDIA_MARK)})", turn.content):
        if piece == MEDIA_MARK:
            parts.append({"type": str(next(media).modality)})
        elif piece or turn.role is Role.ASSISTANT:
            parts.append({"type": "text", "text": piece})
    return parts


def requires_content_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template renders a message only if its content is a list of parts, as LLaVA's does."""

    def renders(content: object) -> bool:
        try:
            with cpu_limit.limit_cpu_seconds(cpu_limit.TEMPLATE_SECONDS, ValueError("it does not end")):
                text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except (TemplateError, TypeError, ValueError, KeyError):
            return False
        return _PROBE_TEXT in str(text)

    return not renders(_PROBE_TEXT) and renders([{"type": "text", "text": _PROBE_TEXT}])


def collect_media(turns: Sequence[Turn]) -> tuple[MediaItem, ...]:
    """Return the images and videos of all turns in order."""
    return tuple(item for turn in turns for item in turn.media)


def expand_placeholders(
    vision: VisionProcessor, origin: str, text: str, spans: Sequence[Span], media: tuple[MediaItem, ...]
) -> ExpandedText:
    """Replace each placeholder of the chat template with the placeholder tokens of its image or video.

    text: the rendered conversation. spans: ranges in `text`; they are converted to ranges in the expanded text.
    Raises: DatasetError if the placeholders do not match the media, or a file cannot be read.
    """
    modalities = {placeholder: modality for modality, placeholder in vision.placeholders.items()}
    # re.split returns the placeholders at odd indices and the text between them at even indices.
    pieces = re.split(f"({'|'.join(map(re.escape, modalities))})", text)
    for modality in Modality:
        _check_placeholder_count(vision, origin, text, modality, media)
    if [modalities[piece] for piece in pieces[1::2]] != [item.modality for item in media]:
        raise DatasetError(
            f"{origin}: the model's chat template renders images and videos in another order than the row has them"
        )
    expanded, ranges = pieces[0], []
    shifts = [(0, 0)]  # (position in `text`, offset of that position in the expanded text)
    position = len(expanded)
    for item, placeholder, next_text in zip(media, pieces[1::2], pieces[2::2], strict=True):
        tokens = vision.render(origin, item)
        ranges.append((vision.identify(origin, item), (len(expanded), len(expanded) + len(tokens))))
        expanded += tokens + next_text
        position += len(placeholder)
        shifts.append((position, ranges[-1][1][1] - position))
        position += len(next_text)
    shifted = tuple((_shift_position(start, shifts), _shift_position(end, shifts)) for start, end in spans)
    return ExpandedText(expanded, shifted, tuple(ranges))


def _shift_position(position: int, shifts: Sequence[tuple[int, int]]) -> int:
    return position + next(offset for start, offset in reversed(shifts) if start <= position)


def _check_placeholder_count(
    vision: VisionProcessor, origin: str, text: str, modality: Modality, media: tuple[MediaItem, ...]
) -> None:
    """Check that the text contains one placeholder per item of the modality and no surplus tags."""
    placeholder = vision.placeholders.get(modality)
    expected = sum(item.modality is modality for item in media)
    if placeholder is None and expected:
        raise DatasetError(
            f"{origin}: contains a {modality}, but models of this family are not trained on {modality}s here; remove"
            " the row"
        )
    if placeholder is None:
        return
    count, tags = text.count(placeholder), text.count(modality.tag) if placeholder != modality.tag else 0
    if count == expected and not tags:
        return
    if count < expected:
        raise DatasetError(
            f"{origin}: has {expected} {modality}s, but the model's chat template renders {count} of them; use the"
            " template of the model's instruct variant"
        )
    surplus_text = modality.tag if tags else placeholder
    raise DatasetError(
        f"{origin}: the text contains {surplus_text} {tags or count - expected} times more than there are {modality}s;"
        f" list the {modality}s in a column {modality}s, or remove {surplus_text} from the text"
    )
