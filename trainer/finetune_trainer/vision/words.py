"""Images among the words of a conversation: as the chat template takes them, and as the model reads them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_trainer.data.examples import Role, Turn
from finetune_trainer.data.pictures import MARK, TAG, Picture
from finetune_trainer.errors import DatasetError
from finetune_trainer.vision.images import Vision

Span = tuple[int, int]


@dataclass(frozen=True)
class Written:
    """A rendered conversation in which every image has as many placeholders as it has tokens."""

    text: str
    spans: tuple[Span, ...]  # of the answers
    images: tuple[tuple[Picture, Span], ...]


def as_parts(turn: Turn) -> list[dict[str, str]]:
    """The content of a message, text and images in their order."""
    parts = []
    for piece in re.split(f"({re.escape(MARK)})", turn.content):
        if piece == MARK:
            parts.append({"type": "image"})
        elif piece or turn.role is Role.ASSISTANT:
            parts.append({"type": "text", "text": piece})
    return parts


def pictures_of(turns: Sequence[Turn]) -> tuple[Picture, ...]:
    return tuple(picture for turn in turns for picture in turn.pictures)


def expand(vision: Vision, place: str, text: str, spans: Sequence[Span], pictures: tuple[Picture, ...]) -> Written:
    """Every placeholder of the template becomes the text of its image. Raises DatasetError if they are not as many."""
    between = text.split(vision.placeholder)
    _check_count(vision, place, text, found=len(between) - 1, pictures=pictures)
    rebuilt, images, moved = between[0], [], [(0, 0)]  # from where on in the old text, by how much
    old = len(between[0])
    for picture, after in zip(pictures, between[1:], strict=True):
        image = vision.write(place, picture)
        images.append((picture, (len(rebuilt), len(rebuilt) + len(image))))
        rebuilt += image + after
        old += len(vision.placeholder)
        moved.append((old, images[-1][1][1] - old))
        old += len(after)
    return Written(rebuilt, tuple((_move(start, moved), _move(end, moved)) for start, end in spans), tuple(images))


def _move(position: int, moved: Sequence[tuple[int, int]]) -> int:
    return position + next(by for start, by in reversed(moved) if start <= position)


def _check_count(vision: Vision, place: str, text: str, *, found: int, pictures: tuple[Picture, ...]) -> None:
    if found == len(pictures) and (vision.placeholder == TAG or TAG not in text):
        return
    sign = TAG if TAG in text else vision.placeholder
    more = text.count(TAG) if sign == TAG and vision.placeholder != TAG else found - len(pictures)
    if more < 0:
        raise DatasetError(
            f"{place}: shows {len(pictures)} images, but the model's chat template writes {found} of them; use the"
            " template of the model's instruct variant"
        )
    raise DatasetError(
        f"{place}: the words hold {sign} {more} times more than there are images; give the images in a column images,"
        f" or take {sign} out of the words"
    )
