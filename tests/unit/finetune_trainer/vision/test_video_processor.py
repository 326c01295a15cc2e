"""What a model that sees makes of videos: which frames, how many tokens, and the pixels that its processor would."""

import base64
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from finetune_trainer.data.token_dataset import IGNORED
from finetune_trainer.data_sources.conversations import Conversation, parse_example
from finetune_trainer.data_sources.media import MARK, Kind, Picture
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError, InvalidSpec
from finetune_trainer.methods.sft import predict
from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.save_processor import save_processor
from finetune_trainer.vision.video_frames import Sampling, frames, survey
from finetune_trainer.vision.video_processor import VideoEye, settings_of
from testing.models import tiny_vision
from testing.models.vision_fixtures import Loaded, assert_equal_but_for_rounding, describe, gradients_of, write

CLIP = Picture("/data/clip.mp4", kind=Kind.VIDEO)
CLOSELY = Sampling(fps=2.0, min_frames=4, max_frames=768, min_pixels=1, max_pixels=10**9)
STREAM = SimpleNamespace(average_rate=4, frames=1)
ANSWER = {"role": "assistant", "content": "It is blue."}


@pytest.fixture(scope="module", params=tiny_vision.SEE_VIDEOS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tiny_vision.build(tmp_path_factory.mktemp(request.param), request.param)
    return Loaded(folder, describe(folder), AutoModelForImageTextToText.from_pretrained(folder))


def eye_of(loaded: Loaded) -> VideoEye:
    assert loaded.pretrained.vision is not None
    assert loaded.pretrained.vision.videos is not None
    return loaded.pretrained.vision.videos


def clip(folder: Path, name: str = "clip.mp4", **fields: Any) -> Picture:
    made = tiny_vision.film(folder, name, (56, 28), **{"frames": 8, "fps": 4, **fields})
    return Picture(str(folder / made), kind=Kind.VIDEO)


def asked(content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, ANSWER], **columns}


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        pytest.param(asked("<video>which?", videos=["clip.mp4"]), CLIP, id="ms-swift"),
        pytest.param(asked("<video>which?", video="clip.mp4"), CLIP, id="one video, not in a list"),
        pytest.param(
            asked([{"type": "video", "video": "clip.mp4"}, {"type": "text", "text": "which?"}]), CLIP, id="Qwen's parts"
        ),
        pytest.param(
            asked([{"type": "video_url", "video_url": {"url": "clip.mp4"}}, {"type": "text", "text": "which?"}]),
            CLIP,
            id="OpenAI's parts",
        ),
        pytest.param(
            asked([{"type": "video", "video": ["a.png", "b.png"]}, {"type": "text", "text": "which?"}]),
            Picture(kind=Kind.VIDEO, frames=("/data/a.png", "/data/b.png")),
            id="frames",
        ),
        pytest.param(
            asked("<video>which?", videos=["data:video/mp4;base64," + base64.b64encode(b"mp4").decode()]),
            Picture(data=b"mp4", kind=Kind.VIDEO),
            id="in the row",
        ),
    ],
)
def test_the_spellings_of_a_video_mean_the_same(columns: dict[str, Any], shown: Picture) -> None:
    example = parse_example(Row("/data/train.jsonl line 7", columns))

    assert isinstance(example, Conversation)
    assert (example.turns[0].content, example.turns[0].pictures) == (f"{MARK}which?", (shown,))


def test_images_and_videos_keep_their_order() -> None:
    columns = asked("<image> then <video> then <image>", images=["a.png", "b.png"], videos=["clip.mp4"])
    example = parse_example(Row("/data/train.jsonl line 7", columns))

    assert example.turns[0].pictures == (Picture("/data/a.png"), CLIP, Picture("/data/b.png"))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "total", "fps", "numbers"),
    [
        pytest.param("qwen2_vl", 24, 8.0, (0, 4, 8, 12, 16, 20), id="two of a second"),
        pytest.param("qwen2_vl", 31, 10.0, (0, 5, 10, 15, 20, 25), id="an even number"),
        pytest.param("qwen2_vl", 7, 30.0, (0, 1, 3, 5), id="at least four"),
        pytest.param("qwen2_vl", 3, 30.0, (0, 1), id="no more than there are"),
        pytest.param("qwen2_vl", 1, 30.0, (0,), id="but one"),
        pytest.param("qwen3_vl", 24, 8.0, (0, 5, 9, 14, 18, 23), id="from the first to the last"),
        pytest.param("qwen3_vl", 3, 30.0, (0, 1, 2), id="all"),
    ],
)
def test_frames_are_chosen_as_the_models_own_processor_does(
    family: str, total: int, fps: float, numbers: tuple[int, ...]
) -> None:
    """As transformers 5.23's processors were seen to choose."""
    videos = FAMILIES[family].videos

    assert videos is not None
    assert videos.choose(CLOSELY, total, fps) == numbers


def test_the_frames_of_a_file_are_those_that_were_chosen(tmp_path: Path) -> None:
    film = survey(clip(tmp_path, frames=8, fps=4), CLOSELY, lambda *_: (0, 3, 7))
    shown = frames(clip(tmp_path), film)

    assert (film.total, film.fps, film.size) == (8, 4.0, (28, 56))
    assert film.moments == (0.375, 1.75)
    colours = torch.randint(0, 256, (8, 3), generator=torch.Generator().manual_seed(0))
    for number, image in zip((0, 3, 7), shown, strict=True):
        assert torch.tensor(image.getpixel((28, 14))).sub(colours[number]).abs().max() < 12  # it is compressed


@pytest.mark.parametrize("name", ["clip.mkv", "clip.avi", "clip.mp4", "clip.m4v"])
def test_frames_are_counted_where_the_file_does_not_say_how_many_there_are(tmp_path: Path, name: str) -> None:
    film = survey(clip(tmp_path, name, frames=9), CLOSELY, lambda *_: (0, 8))

    assert film.total == 9
    assert len(frames(clip(tmp_path, name, frames=9), film)) == 2


def test_a_file_that_ends_early_shows_its_last_frame_for_the_rest(tmp_path: Path) -> None:
    film = survey(clip(tmp_path, frames=8), CLOSELY, lambda *_: (0, 5, 7))

    first, second, third = frames(clip(tmp_path, "short.mp4", frames=6), film)
    assert second.getpixel((0, 0)) == third.getpixel((0, 0)) != first.getpixel((0, 0))


@pytest.mark.parametrize(("rotation", "corner"), [(0, (10, 10)), (90, (10, 45)), (-90, (17, 10)), (180, (45, 17))])
def test_frames_are_turned_upright(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rotation: int, corner: tuple[int, int]
) -> None:
    """By as much, counterclockwise, as the file says that they are to be turned."""
    lying = Image.new("RGB", (56, 28))
    lying.paste((255, 255, 255), (0, 0, 20, 20))
    frame = SimpleNamespace(rotation=rotation, to_image=lambda: lying)
    opened = SimpleNamespace(streams=SimpleNamespace(video=[STREAM]), decode=lambda _stream: iter([frame]))
    monkeypatch.setattr(av, "open", lambda *_, **__: nullcontext(opened))

    film = survey(CLIP, CLOSELY, lambda *_: (0,))

    assert film.size == ((28, 56) if rotation in (0, 180) else (56, 28))
    assert frames(CLIP, film)[0].getpixel(corner) == (255, 255, 255)


def test_frames_that_are_files_are_all_taken(loaded: Loaded, tmp_path: Path) -> None:
    paths = [str(tmp_path / tiny_vision.draw(tmp_path, f"{each}.png", (56, 28), seed=each)) for each in range(4)]
    pixels = eye_of(loaded).pixels(Picture(kind=Kind.VIDEO, frames=tuple(paths)))

    assert pixels["video_grid_thw"][0, 0] == 2
    if loaded.model.config.model_type == "qwen2_5_vl":
        assert pixels["second_per_grid_ts"].tolist() == [1.0]


def test_a_video_that_stands_still_has_the_patches_of_the_image(loaded: Loaded, tmp_path: Path) -> None:
    eye, edge = eye_of(loaded), eye_of(loaded).seen.processor.patch_size * 2
    path = str(tmp_path / tiny_vision.draw(tmp_path, "a.png", (edge * 2, edge), seed=1))
    with Image.open(path) as image:
        still = eye.seen.processor(image.convert("RGB"), return_tensors="pt")["pixel_values"]

    pixels = eye.pixels(Picture(kind=Kind.VIDEO, frames=(path,) * 4))

    assert pixels["video_grid_thw"].tolist() == [[2, 2, 4]]
    torch.testing.assert_close(pixels["pixel_values_videos"], still.repeat(2, 1))


def test_each_frame_is_in_its_own_place_of_a_patch(loaded: Loaded, tmp_path: Path) -> None:
    """(colours, frames, pixels): what another second frame changes is the second frame."""
    eye, edge = eye_of(loaded), eye_of(loaded).seen.processor.patch_size * 2
    one, other = (
        str(tmp_path / tiny_vision.draw(tmp_path, f"{each}.png", (edge * 2, edge), seed=each)) for each in (1, 2)
    )
    still = eye.pixels(Picture(kind=Kind.VIDEO, frames=(one,) * 4))["pixel_values_videos"]
    moving = eye.pixels(Picture(kind=Kind.VIDEO, frames=(one, other, one, one)))["pixel_values_videos"]

    changed = (still != moving).view(2, 8, 3, 2, -1).any(dim=-1).any(dim=2).any(dim=1)
    assert changed.tolist() == [[False, True], [False, False]]


def test_a_video_has_as_many_tokens_as_the_model_makes_of_it(loaded: Loaded, tmp_path: Path) -> None:
    """The models raise an error where they differ."""
    for number, fields in enumerate(({"frames": 3}, {"frames": 9}, {"frames": 20, "fps": 5})):
        clip(tmp_path, f"{number}.mp4", **fields)
    tiny_vision.draw(tmp_path, "a.png", (56, 28), seed=1)
    names = [f"{number}.mp4" for number in range(3)]
    data = loaded.data(
        write(
            tmp_path,
            *(asked("<video>?", videos=[name]) for name in names),
            asked("<video><image><video>?", videos=names[:2], images=["a.png"]),
            asked("no video"),
        )
    )
    collate = loaded.collate()

    for index in range(4):
        assert predict(loaded.model, collate([data.samples[index]])).isfinite().all()
    together = collate([data.samples[index] for index in range(5)])
    assert predict(loaded.model, together).isfinite().all()
    assert len(together["video_grid_thw"]) == 5
    assert data.shown == {Kind.IMAGE, Kind.VIDEO}


def test_nothing_of_a_video_is_learned(loaded: Loaded, tmp_path: Path) -> None:
    clip(tmp_path)
    (row,) = loaded.data(write(tmp_path, asked("<video>?", videos=["clip.mp4"]))).samples[0]

    learned = row["labels"][row["labels"] != IGNORED]
    assert loaded.pretrained.tokenizer.decode(learned) == "It is blue.<|im_end|>"


def test_a_video_is_seen_and_the_order_of_its_frames(loaded: Loaded, tmp_path: Path) -> None:
    names = [tiny_vision.draw(tmp_path, f"{seed}.png", (56, 56), seed=seed) for seed in range(4)]
    row = asked([{"type": "video", "video": names}])
    data = loaded.data(write(tmp_path, row, asked([{"type": "video", "video": names[::-1]}])))
    collate = loaded.collate()

    one, other = (predict(loaded.model, collate([data.samples[index]])) for index in range(2))

    assert (one - other).abs().max() > 1e-4


def test_qwen3_is_told_the_moment_of_each_two_frames(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "model", "qwen3_vl")
    loaded = Loaded(folder, describe(folder), torch.nn.Identity())
    clip(tmp_path, frames=8, fps=4)
    (row,) = loaded.data(write(tmp_path, asked("<video>?", videos=["clip.mp4"]))).samples[0]

    text = str(loaded.pretrained.tokenizer.decode(row["input_ids"])).replace("<|video_pad|>", "")
    assert "<0.2 seconds><|vision_start|><|vision_end|><1.5 seconds><|vision_start|><|vision_end|>?" in text


def test_stand_ins_of_both_kinds_change_no_gradient(loaded: Loaded, tmp_path: Path) -> None:
    clip(tmp_path)
    tiny_vision.draw(tmp_path, "a.png", (56, 28), seed=1)
    rows = (asked("<video>?", videos=["clip.mp4"]), asked("<image>?", images=["a.png"]), asked("nothing"))
    data = loaded.data(write(tmp_path, *rows))

    for index, missing in ((0, "pixel_values"), (1, "pixel_values_videos"), (2, "pixel_values")):
        plain, always = (collate([data.samples[index]]) for collate in (loaded.collate(), loaded.collate(*Kind)))
        assert missing not in plain
        assert {"pixel_values", "pixel_values_videos"} <= always.keys()
        expected, found = gradients_of(loaded.model, plain), gradients_of(loaded.model, always)
        for name, gradient in expected.items():
            assert_equal_but_for_rounding(found[name], gradient)
        for name in found.keys() - expected.keys():
            assert found[name].abs().max() == 0


def test_the_spec_says_how_closely_videos_are_looked_at(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "model")
    vision = describe(folder, videoFps=1, videoMaxFrames=6, videoMaxPixels=784 * 3).vision

    assert vision is not None
    assert vision.videos is not None
    assert vision.videos.sampling == Sampling(1, 4, 6, 784, 784 * 3)
    assert settings_of(vision.videos, str(folder))["size"] == {"shortest_edge": 784, "longest_edge": 784 * 3}
    save_processor(vision, str(folder), tmp_path)
    saved = json.loads((tmp_path / "video_preprocessor_config.json").read_text())
    assert (saved["fps"], saved["max_frames"], saved["video_processor_type"]) == (1, 6, "Qwen2VLVideoProcessor")


def test_the_settings_may_stand_among_those_of_the_whole_processor(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "model")
    own = json.loads((folder / "video_preprocessor_config.json").read_text())
    (folder / "video_preprocessor_config.json").unlink()
    described = {"processor_class": "Qwen2VLProcessor", "video_processor": {**own, "fps": 3}}
    (folder / "processor_config.json").write_text(json.dumps(described))
    vision = describe(folder, videoMaxFrames=6).vision

    assert vision is not None
    assert vision.videos is not None
    assert vision.videos.sampling == Sampling(3, 4, 6, 784, 784 * 8)
    save_processor(vision, str(folder), tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())["video_processor"]
    assert (saved["fps"], saved["max_frames"]) == (3, 6)


def test_without_settings_of_its_own_a_model_looks_as_its_family_does(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "model")
    (folder / "video_preprocessor_config.json").unlink()
    vision = describe(folder).vision

    assert vision is not None
    assert vision.videos is not None
    assert vision.videos.sampling == Sampling(2.0, 4, 768, 128 * 784, 768 * 784)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("qwen2_vl", {"videoMaxPixels": 700}, r"spec\.model\.videoMaxPixels: 700 is less than the 784"),
        ("llava", {"videoFps": 1}, r"spec\.model\.videoFps: .* is not trained on videos here"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, kind: str, fields: dict[str, Any], message: str) -> None:
    tiny_vision.build(tmp_path, kind)

    with pytest.raises(InvalidSpec, match=message):
        describe(tmp_path, **fields)


def no_video(folder: Path) -> dict[str, Any]:
    (folder / "text.mp4").write_text("no video")
    return asked("<video>?", videos=["text.mp4"])


def only_sound(folder: Path) -> dict[str, Any]:
    with av.open(str(folder / "sound.wav"), "w") as file:
        stream = file.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(torch.zeros(1, 800, dtype=torch.int16).numpy(), layout="mono")
        frame.sample_rate = 8000
        file.mux(stream.encode(frame))
    return asked("<video>?", videos=["sound.wav"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (lambda _: asked("<video>?", videos=["none.mp4"]), r"video .*none\.mp4 does not exist; correct its path"),
        (
            lambda _: asked([{"type": "video", "video": ["none.png", "none.png"]}]),
            r"video .*none\.png does not exist; correct its path",
        ),
        (no_video, r"video .*text\.mp4 cannot be read \(.*Invalid data"),
        (only_sound, r"video .*sound\.wav cannot be read \(it holds no pictures"),
        (lambda _: asked("<video>?"), r"<video> 1 times more than there are videos; give the videos in a column"),
        (lambda _: asked("<video>?", videos=["http://host/a.mp4"]), "is on the network"),
        (lambda _: asked("<video>?", videos=[7]), "expected a video's path, or those of its frames"),
        (lambda _: asked([{"type": "video"}]), "expected the video here"),
    ],
)
def test_a_video_that_cannot_be_shown_is_a_bad_row(loaded: Loaded, tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=rf"rows.jsonl line 1.*{message}"):
        loaded.data(write(tmp_path, row(tmp_path)))


def test_a_family_that_sees_images_only_is_shown_no_videos(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "model", "llava")
    clip(tmp_path)

    with pytest.raises(DatasetError, match="line 1: shows a video, which models of this family are not trained on"):
        Loaded(folder, describe(folder), torch.nn.Identity()).data(
            write(tmp_path, asked("<video>?", videos=["clip.mp4"]))
        )
