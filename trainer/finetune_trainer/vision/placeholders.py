"""Images and videos among the words of a conversation: as the chat template takes them, and as the model reads them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_trainer.data_sources.conversations import Role, Turn
from finetune_trainer.data_sources.media import MARK, Kind, Picture
from finetune_trainer.errors import DatasetError
from finetune_trainer.vision.processor import Vision

Span = tuple[int, int]


@dataclass(frozen=True)
class Written:
    """A rendered conversation in which every image and video has as many placeholders as it has tokens."""

    text: str
    spans: tuple[Span, ...]  # of the answers
    images: tuple[tuple[Picture, Span], ...]  # and videos


def as_parts(turn: Turn) -> list[dict[str, str]]:
    """The content of a message: text, images and videos in their order."""
    parts, pictures = [], iter(turn.pictures)
    for piece in re.split(f"({re.escape(MARK)})", turn.content):
        if piece == MARK:
            parts.append({"type": str(next(pictures).kind)})
        elif piece or turn.role is Role.ASSISTANT:
            parts.append({"type": "text", "text": piece})
    return parts


def pictures_of(turns: Sequence[Turn]) -> tuple[Picture, ...]:
    return tuple(picture for turn in turns for picture in turn.pictures)


def expand(vision: Vision, place: str, text: str, spans: Sequence[Span], pictures: tuple[Picture, ...]) -> Written:
    """Every placeholder of the template becomes the text of its picture. Raises DatasetError if they do not match."""
    kinds = {placeholder: kind for kind, placeholder in vision.placeholders.items()}
    pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
    for kind in Kind:
        _check_count(vision, place, text, kind, pictures)
    if [kinds[piece] for piece in pieces[1::2]] != [picture.kind for picture in pictures]:
        raise DatasetError(
            f"{place}: the model's chat template writes images and videos in another order than the row shows them"
        )
    rebuilt, images, moved = pieces[0], [], [(0, 0)]  # from where on in the old text, by how much
    old = len(rebuilt)
    for picture, placeholder, after in zip(pictures, pieces[1::2], pieces[2::2], strict=True):
        image = vision.write(place, picture)
        images.append((picture, (len(rebuilt), len(rebuilt) + len(image))))
        rebuilt += image + after
        old += len(placeholder)
        moved.append((old, images[-1][1][1] - old))
        old += len(after)
    return Written(rebuilt, tuple((_move(start, moved), _move(end, moved)) for start, end in spans), tuple(images))


def _move(position: int, moved: Sequence[tuple[int, int]]) -> int:
    return position + next(by for start, by in reversed(moved) if start <= position)


def _check_count(vision: Vision, place: str, text: str, kind: Kind, pictures: tuple[Picture, ...]) -> None:
    """As many placeholders as pictures of the kind; a tag that was left in the words would show nothing."""
    placeholder = vision.placeholders.get(kind)
    shown = sum(picture.kind is kind for picture in pictures)
    if placeholder is None and shown:
        raise DatasetError(f"{place}: shows a {kind}, which models of this family are not trained on; take the row out")
    if placeholder is None:
        return
    found, tags = text.count(placeholder), text.count(kind.tag) if placeholder != kind.tag else 0
    if found == shown and not tags:
        return
    if found < shown:
        raise DatasetError(
            f"{place}: shows {shown} {kind}s, but the model's chat template writes {found} of them; use the"
            " template of the model's instruct variant"
        )
    sign = kind.tag if tags else placeholder
    raise DatasetError(
        f"{place}: the words hold {sign} {tags or found - shown} times more than there are {kind}s; give the {kind}s in"
        f" a column {kind}s, or take {sign} out of the words"
    )
