"""Tests parsing images and their positions in the text of a row, and the errors for invalid images."""

import base64
import re
from typing import Any

import pytest

from finetune_trainer.data_sources.conversations import Conversation, parse_example
from finetune_trainer.data_sources.media import MEDIA_MARK, MediaItem
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError

ORIGIN = "/data/train.jsonl line 7"
IMAGE_A, IMAGE_B = MediaItem("/data/a.png"), MediaItem("/elsewhere/b.png")
ANSWER = {"role": "assistant", "content": "a"}


def row(*user_contents: Any, **columns: Any) -> dict[str, Any]:
    """Return a column of messages with an assistant turn after each user turn."""
    messages = [message for content in user_contents for message in ({"role": "user", "content": content}, ANSWER)]
    return {"messages": messages, **columns}


def parse_columns(columns: dict[str, Any]) -> Conversation:
    example = parse_example(Row(ORIGIN, columns))
    assert isinstance(example, Conversation)
    return example


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param(row("<image>which?", images=["a.png"]), id="ms-swift"),
        pytest.param(row("<image>which?", image="a.png"), id="path instead of list"),
        pytest.param(row("<image>which?", images=[{"bytes": None, "path": "a.png"}]), id="datasets library"),
        pytest.param(
            {
                "conversations": [{"from": "human", "value": "<image>which?"}, {"from": "gpt", "value": "a"}],
                "image": "a.png",
            },
            id="LLaVA ShareGPT",
        ),
        pytest.param(
            row([{"type": "image", "image": "a.png"}, {"type": "text", "text": "which?"}]), id="Qwen content parts"
        ),
        pytest.param(
            row([{"type": "image", "path": "a.png"}, {"type": "text", "text": "which?"}]), id="content part with path"
        ),
        pytest.param(
            row([{"type": "image_url", "image_url": {"url": "file://a.png"}}, {"type": "text", "text": "which?"}]),
            id="OpenAI content parts",
        ),
        pytest.param(
            row([{"type": "image"}, {"type": "text", "text": "which?"}], images=["a.png"]), id="content part and column"
        ),
        pytest.param({"query": "<image>which?", "response": "a", "images": ["a.png"]}, id="query and response"),
    ],
)
def test_all_image_formats_are_parsed_into_the_same_turn(columns: dict[str, Any]) -> None:
    user_turn = parse_columns(columns).turns[0]

    assert (user_turn.content, user_turn.media) == (f"{MEDIA_MARK}which?", (IMAGE_A,))


def test_images_in_a_column_are_assigned_to_the_tags_in_order() -> None:
    turns = parse_columns(
        row("<image> or <image>?", "and <image>", images=["a.png", "/elsewhere/b.png", "a.png"])
    ).turns

    assert [turn.media for turn in turns] == [(IMAGE_A, IMAGE_B), (), (IMAGE_A,), ()]
    assert turns[0].content == f"{MEDIA_MARK} or {MEDIA_MARK}?"


@pytest.mark.parametrize("url", [{"url": "data:image/png;base64," + base64.b64encode(b"png").decode()}, b"png"])
def test_an_image_can_be_embedded_in_a_row(url: object) -> None:
    assert parse_columns(row([{"type": "image_url", "image_url": url}])).turns[0].media == (MediaItem(data=b"png"),)


@pytest.mark.parametrize("columns", [{}, {"images": []}, {"images": None}, {"image": ""}])
def test_a_tag_without_an_image_column_is_plain_text(columns: dict[str, Any]) -> None:
    user_turn = parse_columns(row("what does <img> or <image> do?", **columns)).turns[0]

    assert (user_turn.content, user_turn.media) == ("what does <img> or <image> do?", ())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param(
            row("<image><image>", images=["a"]),
            "2 x <image> in the messages, but 1 in the column",
            id="more tags than images",
        ),
        pytest.param(
            row("<image>", images=["a", "b"]),
            "1 x <image> in the messages, but 2 in the column",
            id="fewer tags than images",
        ),
        pytest.param(row("look", images=["a"]), "0 x <image> in the messages, but 1 in the column", id="no tag"),
        pytest.param(row("<image>", images=["https://host/a.png"]), "is on the network", id="URL"),
        pytest.param(
            row("<image>", images=[7]),
            "column images[0]: expected the path or the bytes of an image",
            id="number instead of path",
        ),
        pytest.param(
            row([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}]),
            "expected the image as base64",
            id="invalid base64",
        ),
        pytest.param(
            row([{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}]),
            "expected data:image/...;base64,...",
            id="data URL without base64",
        ),
        pytest.param(
            row([{"type": "image"}]), "content[0]: expected the image here", id="content part without an image"
        ),
        pytest.param(
            row([{"type": "audio", "audio": "a.wav"}]), "content[0].type: expected text, image or video", id="audio"
        ),
        pytest.param(
            {
                "messages": [{"role": "user", "content": "draw"}, {"role": "assistant", "content": "<image>"}],
                "images": ["a"],
            },
            "turn 1 (assistant) contains image /data/a; only",
            id="image in an assistant turn",
        ),
        pytest.param(
            {"prompt": "<image>", "completion": "a", "images": ["a"]},
            "write the row as messages",
            id="prompt and completion",
        ),
    ],
)
def test_the_error_for_an_invalid_image_contains_the_row_origin(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=f"^{re.escape(ORIGIN)}.*{re.escape(message)}"):
        parse_columns(columns)
