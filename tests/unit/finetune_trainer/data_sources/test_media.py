import base64
from typing import Any

import pytest

from finetune_trainer.data_sources.conversations import Conversation, parse_example
from finetune_trainer.data_sources.media import MARK, Picture
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError

PLACE = "/data/train.jsonl line 7"
A, B = Picture("/data/a.png"), Picture("/elsewhere/b.png")
ANSWER = {"role": "assistant", "content": "a"}


def ask(*content: Any, **columns: Any) -> dict[str, Any]:
    """Questions, each with an answer."""
    messages = [message for each in content for message in ({"role": "user", "content": each}, ANSWER)]
    return {"messages": messages, **columns}


def parse(columns: dict[str, Any]) -> Conversation:
    example = parse_example(Row(PLACE, columns))
    assert isinstance(example, Conversation)
    return example


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param(ask("<image>which?", images=["a.png"]), id="ms-swift"),
        pytest.param(ask("<image>which?", image="a.png"), id="one image, not in a list"),
        pytest.param(ask("<image>which?", images=[{"bytes": None, "path": "a.png"}]), id="datasets"),
        pytest.param(
            {
                "conversations": [{"from": "human", "value": "<image>which?"}, {"from": "gpt", "value": "a"}],
                "image": "a.png",
            },
            id="LLaVA's ShareGPT",
        ),
        pytest.param(ask([{"type": "image", "image": "a.png"}, {"type": "text", "text": "which?"}]), id="Qwen's parts"),
        pytest.param(ask([{"type": "image", "path": "a.png"}, {"type": "text", "text": "which?"}]), id="a path"),
        pytest.param(
            ask([{"type": "image_url", "image_url": {"url": "file://a.png"}}, {"type": "text", "text": "which?"}]),
            id="OpenAI's parts",
        ),
        pytest.param(
            ask([{"type": "image"}, {"type": "text", "text": "which?"}], images=["a.png"]), id="parts and a column"
        ),
        pytest.param({"query": "<image>which?", "response": "a", "images": ["a.png"]}, id="query and response"),
    ],
)
def test_the_spellings_of_an_image_mean_the_same(columns: dict[str, Any]) -> None:
    question = parse(columns).turns[0]

    assert (question.content, question.pictures) == (f"{MARK}which?", (A,))


def test_images_are_shown_in_their_order_over_all_turns() -> None:
    turns = parse(ask("<image> or <image>?", "and <image>", images=["a.png", "/elsewhere/b.png", "a.png"])).turns

    assert [turn.pictures for turn in turns] == [(A, B), (), (A,), ()]
    assert turns[0].content == f"{MARK} or {MARK}?"


@pytest.mark.parametrize("url", [{"url": "data:image/png;base64," + base64.b64encode(b"png").decode()}, b"png"])
def test_an_image_may_stand_in_its_row(url: object) -> None:
    assert parse(ask([{"type": "image_url", "image_url": url}])).turns[0].pictures == (Picture(data=b"png"),)


@pytest.mark.parametrize("columns", [{}, {"images": []}, {"images": None}, {"image": ""}])
def test_without_images_the_tag_is_a_word(columns: dict[str, Any]) -> None:
    question = parse(ask("what does <img> or <image> do?", **columns)).turns[0]

    assert (question.content, question.pictures) == ("what does <img> or <image> do?", ())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param(
            ask("<image><image>", images=["a"]), "2 x <image> in the messages, but 1 in the column", id="more"
        ),
        pytest.param(ask("<image>", images=["a", "b"]), "1 x <image> in the messages, but 2 in the column", id="fewer"),
        pytest.param(ask("look", images=["a"]), "0 x <image> in the messages, but 1 in the column", id="no place"),
        pytest.param(ask("<image>", images=["https://host/a.png"]), "is on the network", id="a URL"),
        pytest.param(
            ask("<image>", images=[7]), "column images[0]: expected an image's path or its bytes", id="a number"
        ),
        pytest.param(
            ask([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}]),
            "expected the image in base64",
            id="no base64",
        ),
        pytest.param(
            ask([{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}]),
            "expected data:image/...;base64,...",
            id="another data URL",
        ),
        pytest.param(ask([{"type": "image"}]), "content[0]: expected the image here", id="a part without an image"),
        pytest.param(
            ask([{"type": "audio", "audio": "a.wav"}]), "content[0].type: expected text, image or video", id="a sound"
        ),
        pytest.param(
            {
                "messages": [{"role": "user", "content": "draw"}, {"role": "assistant", "content": "<image>"}],
                "images": ["a"],
            },
            "turn 1 is the assistant's and shows image /data/a; only",
            id="an image as an answer",
        ),
        pytest.param(
            {"prompt": "<image>", "completion": "a", "images": ["a"]}, "give the row as messages", id="a prompt"
        ),
    ],
)
def test_what_is_wrong_with_an_image_is_said_with_its_place(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError) as error:
        parse(columns)

    assert message in str(error.value)
    assert str(error.value).startswith(PLACE)
