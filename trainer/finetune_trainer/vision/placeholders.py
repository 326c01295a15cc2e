"""Images and videos in the text of a conversation: content parts for the chat template, placeholders for the model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_trainer.data_sources.media import MEDIA_MARK, MediaItem, Modality
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.errors import DatasetError
from finetune_trainer.vision.processor import VisionProcessor

Span = tuple[int, int]  # start and end in characters; the end is exclusive


@dataclass(frozen=True)
class ExpandedText:
    """A rendered conversation in which every image and video has as many placeholder tokens as embeddings."""

    text: str
    spans: tuple[Span, ...]  # of the assistant turns
    media: tuple[tuple[MediaItem, Span], ...]


def to_content_parts(turn: Turn) -> list[dict[str, str]]:
    """Return the content parts of a message, text and media in their order, as chat templates accept them."""
    parts, media = [], iter(turn.media)
    for piece in re.split(f"({re.escape(MEDIA_MARK)})", turn.content):
        if piece == MEDIA_MARK:
            parts.append({"type": str(next(media).modality)})
        elif piece or turn.role is Role.ASSISTANT:
            parts.append({"type": "text", "text": piece})
    return parts


def collect_media(turns: Sequence[Turn]) -> tuple[MediaItem, ...]:
    """Return the images and videos of all turns in their order."""
    return tuple(item for turn in turns for item in turn.media)


def expand_placeholders(
    vision: VisionProcessor, origin: str, text: str, spans: Sequence[Span], media: tuple[MediaItem, ...]
) -> ExpandedText:
    """Replace every placeholder of the chat template by the placeholder tokens of its image or video.

    text: the conversation as the template rendered it. spans: ranges of `text`, returned as ranges of the result.
    Raises: DatasetError if placeholders and media do not match, or a file cannot be read.
    """
    modalities = {placeholder: modality for modality, placeholder in vision.placeholders.items()}
    # Odd pieces are placeholders, even pieces the text between them.
    pieces = re.split(f"({'|'.join(map(re.escape, modalities))})", text)
    for modality in Modality:
        _check_count(vision, origin, text, modality, media)
    if [modalities[piece] for piece in pieces[1::2]] != [item.modality for item in media]:
        raise DatasetError(
            f"{origin}: the model's chat template renders images and videos in another order than the row has them"
        )
    expanded, ranges, shifts = pieces[0], [], [(0, 0)]  # shifts: from this position in `text` on, shift by this much
    position = len(expanded)
    for item, placeholder, after in zip(media, pieces[1::2], pieces[2::2], strict=True):
        tokens = vision.render(origin, item)
        ranges.append((item, (len(expanded), len(expanded) + len(tokens))))
        expanded += tokens + after
        position += len(placeholder)
        shifts.append((position, ranges[-1][1][1] - position))
        position += len(after)
    shifted = tuple((_shift(start, shifts), _shift(end, shifts)) for start, end in spans)
    return ExpandedText(expanded, shifted, tuple(ranges))


def _shift(position: int, shifts: Sequence[tuple[int, int]]) -> int:
    return position + next(by for start, by in reversed(shifts) if start <= position)


def _check_count(
    vision: VisionProcessor, origin: str, text: str, modality: Modality, media: tuple[MediaItem, ...]
) -> None:
    """Check that the text has one placeholder per item of the modality, and no tag without an item."""
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
    superfluous = modality.tag if tags else placeholder
    raise DatasetError(
        f"{origin}: the text contains {superfluous} {tags or count - expected} times more than there are {modality}s;"
        f" list the {modality}s in a column {modality}s, or remove {superfluous} from the text"
    )
