"""Tests sampling, rendering and processing of videos, and the errors for invalid videos."""

import base64
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from finetune_trainer.data.token_dataset import IGNORE_INDEX
from finetune_trainer.data_sources.conversations import Conversation, parse_example
from finetune_trainer.data_sources.media import MEDIA_MARK, MediaItem, Modality
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError, InvalidSpec
from finetune_trainer.model.load import ModelDescription
from finetune_trainer.training.token_losses import compute_logits
from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.save_processor import save_processor
from finetune_trainer.vision.video_frames import FrameSampling, decode_frames, probe_video
from finetune_trainer.vision.video_processor import VideoProcessor, export_video_settings
from testing.models import tiny_vision
from testing.models.vision_fixtures import (
    LoadedVisionModel,
    assert_close_up_to_rounding,
    compute_gradients,
    describe_folder,
    write_rows,
)

CLIP = MediaItem("/data/clip.mp4", modality=Modality.VIDEO)
SAMPLING = FrameSampling(fps=2.0, min_frames=4, max_frames=768, min_pixels=1, max_pixels=10**9)
STREAM = SimpleNamespace(average_rate=4, frames=1)
ANSWER = {"role": "assistant", "content": "It is blue."}


@pytest.fixture(scope="module", params=tiny_vision.VIDEO_MODEL_TYPES)
def loaded_model(request: pytest.FixtureRequest, get_vision_folder: Callable[[str], Path]) -> LoadedVisionModel:
    folder = get_vision_folder(request.param)
    return LoadedVisionModel(folder, describe_folder(folder), AutoModelForImageTextToText.from_pretrained(folder))


def get_video_processor(model_description: ModelDescription) -> VideoProcessor:
    assert model_description.vision is not None
    assert model_description.vision.video_processor is not None
    return model_description.vision.video_processor


def write_clip(folder: Path, name: str = "clip.mp4", **video_options: Any) -> MediaItem:
    file_name = tiny_vision.write_video(folder, name, (56, 28), **{"frames": 8, "fps": 4, **video_options})
    return MediaItem(str(folder / file_name), modality=Modality.VIDEO)


def columns_of(content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, ANSWER], **columns}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        pytest.param(columns_of("<video>which?", videos=["clip.mp4"]), CLIP, id="ms-swift"),
        pytest.param(columns_of("<video>which?", video="clip.mp4"), CLIP, id="path instead of list"),
        pytest.param(
            columns_of([{"type": "video", "video": "clip.mp4"}, {"type": "text", "text": "which?"}]),
            CLIP,
            id="Qwen content parts",
        ),
        pytest.param(
            columns_of([{"type": "video_url", "video_url": {"url": "clip.mp4"}}, {"type": "text", "text": "which?"}]),
            CLIP,
            id="OpenAI content parts",
        ),
        pytest.param(
            columns_of([{"type": "video", "video": ["a.png", "b.png"]}, {"type": "text", "text": "which?"}]),
            MediaItem(modality=Modality.VIDEO, frames=("/data/a.png", "/data/b.png")),
            id="frames",
        ),
        pytest.param(
            columns_of("<video>which?", videos=["data:video/mp4;base64," + base64.b64encode(b"mp4").decode()]),
            MediaItem(data=b"mp4", modality=Modality.VIDEO),
            id="bytes in the row",
        ),
    ],
)
def test_all_video_formats_are_parsed(columns: dict[str, Any], expected: MediaItem) -> None:
    example = parse_example(Row("/data/train.jsonl line 7", columns))

    assert isinstance(example, Conversation)
    assert (example.turns[0].content, example.turns[0].media) == (f"{MEDIA_MARK}which?", (expected,))


def test_images_and_videos_are_parsed_in_order() -> None:
    columns = columns_of("<image> then <video> then <image>", images=["a.png", "b.png"], videos=["clip.mp4"])
    example = parse_example(Row("/data/train.jsonl line 7", columns))

    assert example.turns[0].media == (MediaItem("/data/a.png"), CLIP, MediaItem("/data/b.png"))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "total_frames", "fps", "frame_indices"),
    [
        pytest.param("qwen2_vl", 24, 8.0, (0, 4, 8, 12, 16, 20), id="two frames per second"),
        pytest.param("qwen2_vl", 31, 10.0, (0, 5, 10, 15, 20, 25), id="even number of frames"),
        pytest.param("qwen2_vl", 7, 30.0, (0, 1, 3, 5), id="at least four frames"),
        pytest.param("qwen2_vl", 3, 30.0, (0, 1), id="at most all frames"),
        pytest.param("qwen2_vl", 1, 30.0, (0,), id="single frame"),
        pytest.param("qwen3_vl", 24, 8.0, (0, 5, 9, 14, 18, 23), id="first to last frame"),
        pytest.param("qwen3_vl", 3, 30.0, (0, 1, 2), id="all frames"),
    ],
)
def test_sampled_frames_match_the_transformers_processor(
    family: str, total_frames: int, fps: float, frame_indices: tuple[int, ...]
) -> None:
    """The expected indices were generated with the video processors of transformers 5.23."""
    video_support = FAMILIES[family].video_support

    assert video_support is not None
    assert video_support.choose_frames(SAMPLING, total_frames, fps) == frame_indices


def test_the_sampled_frames_are_decoded(tmp_path: Path) -> None:
    video = probe_video(write_clip(tmp_path, frames=8, fps=4), SAMPLING, lambda *_: (0, 3, 7))
    images = decode_frames(write_clip(tmp_path), video)

    assert (video.total_frames, video.fps, video.size) == (8, 4.0, (28, 56))
    assert video.timestamps == (0.375, 1.75)
    colors = torch.randint(0, 256, (8, 3), generator=torch.Generator().manual_seed(0))
    for number, image in zip((0, 3, 7), images, strict=True):
        difference = torch.tensor(image.getpixel((28, 14))).sub(colors[number])
        assert difference.abs().max() < 12  # compression error of a color from 0 to 255


@pytest.mark.parametrize("name", ["clip.mkv", "clip.avi", "clip.mp4", "clip.m4v"])
def test_packets_are_counted_if_the_header_has_no_frame_count(tmp_path: Path, name: str) -> None:
    video = probe_video(write_clip(tmp_path, name, frames=9), SAMPLING, lambda *_: (0, 8))

    assert video.total_frames == 9
    assert len(decode_frames(write_clip(tmp_path, name, frames=9), video)) == 2


def test_the_last_decoded_frame_replaces_missing_frames(tmp_path: Path) -> None:
    video = probe_video(write_clip(tmp_path, frames=8), SAMPLING, lambda *_: (0, 5, 7))

    first, second, third = decode_frames(write_clip(tmp_path, "short.mp4", frames=6), video)
    assert second.getpixel((0, 0)) == third.getpixel((0, 0)) != first.getpixel((0, 0))


@pytest.mark.parametrize(("rotation", "corner"), [(0, (10, 10)), (90, (10, 45)), (-90, (17, 10)), (180, (45, 17))])
def test_frames_are_rotated_upright(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rotation: int, corner: tuple[int, int]
) -> None:
    """Video metadata specifies the rotation counterclockwise."""
    rotated_image = Image.new("RGB", (56, 28))
    rotated_image.paste((255, 255, 255), (0, 0, 20, 20))
    frame = SimpleNamespace(rotation=rotation, to_image=lambda: rotated_image)
    container = SimpleNamespace(streams=SimpleNamespace(video=[STREAM]), decode=lambda _stream: iter([frame]))
    monkeypatch.setattr(av, "open", lambda *_, **__: nullcontext(container))

    video = probe_video(MediaItem(data=b"clip", modality=Modality.VIDEO), SAMPLING, lambda *_: (0,))

    assert video.size == ((28, 56) if rotation in (0, 180) else (56, 28))
    assert decode_frames(MediaItem(data=b"clip", modality=Modality.VIDEO), video)[0].getpixel(corner) == (255, 255, 255)


def test_every_image_of_a_list_is_used_as_a_frame(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    paths = [str(tmp_path / tiny_vision.write_image(tmp_path, f"{seed}.png", (56, 28), seed=seed)) for seed in range(4)]
    processor = get_video_processor(loaded_model.model_description)
    pixels = processor.load_pixels(MediaItem(modality=Modality.VIDEO, frames=tuple(paths)))

    assert pixels["video_grid_thw"][0, 0] == 2
    if loaded_model.model.config.model_type == "qwen2_5_vl":
        assert pixels["second_per_grid_ts"].tolist() == [1.0]


def test_a_video_of_identical_frames_has_the_same_patches_as_the_image(
    loaded_model: LoadedVisionModel, tmp_path: Path
) -> None:
    processor = get_video_processor(loaded_model.model_description)
    edge = processor.components.processor.patch_size * 2
    path = str(tmp_path / tiny_vision.write_image(tmp_path, "a.png", (edge * 2, edge), seed=1))
    with Image.open(path) as image:
        still = processor.components.processor(image.convert("RGB"), return_tensors="pt")["pixel_values"]

    pixels = processor.load_pixels(MediaItem(modality=Modality.VIDEO, frames=(path,) * 4))

    assert pixels["video_grid_thw"].tolist() == [[2, 2, 4]]
    torch.testing.assert_close(pixels["pixel_values_videos"], still.repeat(2, 1))


def test_each_frame_fills_a_separate_slice_of_a_patch(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    """A patch is (colors, frames, pixels); replacing the second frame changes only the second slice."""
    processor = get_video_processor(loaded_model.model_description)
    edge = processor.components.processor.patch_size * 2
    first, second = (
        str(tmp_path / tiny_vision.write_image(tmp_path, f"{seed}.png", (edge * 2, edge), seed=seed)) for seed in (1, 2)
    )
    still, moving = (
        processor.load_pixels(MediaItem(modality=Modality.VIDEO, frames=frames))["pixel_values_videos"]
        for frames in ((first,) * 4, (first, second, first, first))
    )

    changed = (still != moving).view(2, 8, 3, 2, -1).any(dim=-1).any(dim=2).any(dim=1)
    assert changed.tolist() == [[False, True], [False, False]]


def test_video_tokens_match_the_number_of_video_embeddings(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    """The model raises an error if the numbers of tokens and embeddings differ."""
    for number, fields in enumerate(({"frames": 3}, {"frames": 9}, {"frames": 20, "fps": 5})):
        write_clip(tmp_path, f"{number}.mp4", **fields)
    tiny_vision.write_image(tmp_path, "a.png", (56, 28), seed=1)
    names = [f"{number}.mp4" for number in range(3)]
    data = loaded_model.load_data(
        write_rows(
            tmp_path,
            *(columns_of("<video>?", videos=[name]) for name in names),
            columns_of("<video><image><video>?", videos=names[:2], images=["a.png"]),
            columns_of("no video"),
        )
    )
    collate = loaded_model.create_collator()

    assert compute_logits(loaded_model.model, collate([data.samples[0]])).isfinite().all()
    together = collate([data.samples[index] for index in range(5)])
    assert compute_logits(loaded_model.model, together).isfinite().all()
    assert len(together.inputs["video_grid_thw"]) == 5
    assert data.modalities == {Modality.IMAGE, Modality.VIDEO}


def test_video_tokens_are_not_targets(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    write_clip(tmp_path)
    (row,) = loaded_model.load_data(write_rows(tmp_path, columns_of("<video>?", videos=["clip.mp4"]))).samples[0]

    targets = row["labels"][row["labels"] != IGNORE_INDEX]
    assert loaded_model.model_description.tokenizer.decode(targets) == "It is blue.<|im_end|>"


def test_the_logits_depend_on_the_frame_order(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    names = [tiny_vision.write_image(tmp_path, f"{seed}.png", (56, 56), seed=seed) for seed in range(4)]
    row = columns_of([{"type": "video", "video": names}])
    data = loaded_model.load_data(write_rows(tmp_path, row, columns_of([{"type": "video", "video": names[::-1]}])))
    collate = loaded_model.create_collator()

    forward, reversed_order = (compute_logits(loaded_model.model, collate([data.samples[index]])) for index in range(2))

    assert (forward - reversed_order).abs().max() > 1e-4


def test_qwen3_renders_a_timestamp_before_each_pair_of_frames(
    tmp_path: Path, get_vision_folder: Callable[[str], Path]
) -> None:
    folder = get_vision_folder("qwen3_vl")
    loaded_model = LoadedVisionModel(folder, describe_folder(folder), torch.nn.Identity())
    write_clip(tmp_path, frames=8, fps=4)
    (row,) = loaded_model.load_data(write_rows(tmp_path, columns_of("<video>?", videos=["clip.mp4"]))).samples[0]

    text = str(loaded_model.model_description.tokenizer.decode(row["input_ids"])).replace("<|video_pad|>", "")
    assert "<0.2 seconds><|vision_start|><|vision_end|><1.5 seconds><|vision_start|><|vision_end|>?" in text


def test_dummy_images_and_videos_do_not_change_gradients(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    write_clip(tmp_path)
    tiny_vision.write_image(tmp_path, "a.png", (56, 28), seed=1)
    rows = (
        columns_of("<video>?", videos=["clip.mp4"]),
        columns_of("<image>?", images=["a.png"]),
        columns_of("no media"),
    )
    data = loaded_model.load_data(write_rows(tmp_path, *rows))

    for index, missing in ((0, "pixel_values"), (1, "pixel_values_videos"), (2, "pixel_values")):
        plain, with_dummies = (
            collate([data.samples[index]])
            for collate in (loaded_model.create_collator(), loaded_model.create_collator(*Modality))
        )
        assert missing not in plain.inputs
        assert {"pixel_values", "pixel_values_videos"} <= with_dummies.inputs.keys()
        expected, actual = (compute_gradients(loaded_model.model, batch) for batch in (plain, with_dummies))
        for name, gradient in expected.items():
            assert_close_up_to_rounding(actual[name], gradient)
        for name in actual.keys() - expected.keys():
            assert actual[name].abs().max() == 0


def test_video_settings_of_the_spec_are_used_and_saved(
    tmp_path: Path, get_vision_folder: Callable[[str], Path]
) -> None:
    folder = get_vision_folder("qwen2_vl")
    description = describe_folder(folder, videoFps=1, videoMaxFrames=6, videoMaxPixels=784 * 3)
    processor = get_video_processor(description)

    assert processor.sampling == FrameSampling(1, 4, 6, 784, 784 * 3)
    size = export_video_settings(processor, str(folder), None)["size"]
    assert size == {"shortest_edge": 784, "longest_edge": 784 * 3}
    save_processor(description.vision, str(folder), None, tmp_path)  # type: ignore[arg-type]
    saved = json.loads((tmp_path / "video_preprocessor_config.json").read_text())
    assert (saved["fps"], saved["max_frames"], saved["video_processor_type"]) == (1, 6, "Qwen2VLVideoProcessor")


def test_video_settings_are_read_from_and_written_to_the_processor_config(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "model")
    video_settings = json.loads((folder / "video_preprocessor_config.json").read_text())
    (folder / "video_preprocessor_config.json").unlink()
    processor_config = {"processor_class": "Qwen2VLProcessor", "video_processor": {**video_settings, "fps": 3}}
    (folder / "processor_config.json").write_text(json.dumps(processor_config))
    description = describe_folder(folder, videoMaxFrames=6)

    assert get_video_processor(description).sampling == FrameSampling(3, 4, 6, 784, 784 * 8)
    save_processor(description.vision, str(folder), None, tmp_path)  # type: ignore[arg-type]
    saved = json.loads((tmp_path / "processor_config.json").read_text())["video_processor"]
    assert (saved["fps"], saved["max_frames"]) == (3, 6)


def test_a_model_without_video_settings_uses_the_defaults_of_its_family(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "model")
    (folder / "video_preprocessor_config.json").unlink()

    sampling = get_video_processor(describe_folder(folder)).sampling

    assert sampling == FrameSampling(2.0, 4, 768, 128 * 784, 768 * 784)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("qwen2_vl", {"videoMaxPixels": 700}, r"spec\.model\.videoMaxPixels: 700 is less than the 784"),
        ("llava", {"videoFps": 1}, r"spec\.model\.videoFps: .* is not trained on videos here"),
    ],
)
def test_invalid_video_fields_are_rejected(
    get_vision_folder: Callable[[str], Path], model_type: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSpec, match=message):
        describe_folder(get_vision_folder(model_type), **fields)


def build_row_with_text_file(folder: Path) -> dict[str, Any]:
    (folder / "text.mp4").write_text("not a video")
    return columns_of("<video>?", videos=["text.mp4"])


def build_row_with_audio_only(folder: Path) -> dict[str, Any]:
    with av.open(str(folder / "sound.wav"), "w") as file:
        stream = file.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(torch.zeros(1, 800, dtype=torch.int16).numpy(), layout="mono")
        frame.sample_rate = 8000
        file.mux(stream.encode(frame))
    return columns_of("<video>?", videos=["sound.wav"])


@pytest.mark.parametrize(
    ("build_bad_columns", "message"),
    [
        (lambda _: columns_of("<video>?", videos=["none.mp4"]), r"video .*none\.mp4 does not exist; correct its path"),
        (
            lambda _: columns_of([{"type": "video", "video": ["none.png", "none.png"]}]),
            r"video .*none\.png does not exist; correct its path",
        ),
        (build_row_with_text_file, r"video .*text\.mp4 cannot be read \(.*Invalid data"),
        (build_row_with_audio_only, r"video .*sound\.wav cannot be read \(it contains no video stream"),
        (lambda _: columns_of("<video>?"), "<video> 1 times more than there are videos; list the videos in a column"),
        (lambda _: columns_of("<video>?", videos=["http://host/a.mp4"]), "is on the network"),
        (lambda _: columns_of("<video>?", videos=[7]), "expected the path of a video or of each of its frames"),
        (lambda _: columns_of([{"type": "video"}]), "expected the video here"),
    ],
)
def test_a_row_with_an_invalid_video_is_a_bad_row(
    loaded_model: LoadedVisionModel, tmp_path: Path, build_bad_columns: Any, message: str
) -> None:
    with pytest.raises(DatasetError, match=rf"rows.jsonl line 1.*{message}"):
        loaded_model.load_data(write_rows(tmp_path, build_bad_columns(tmp_path)))


def test_videos_are_rejected_for_a_family_that_supports_only_images(
    tmp_path: Path, get_vision_folder: Callable[[str], Path]
) -> None:
    folder = get_vision_folder("llava")
    write_clip(tmp_path)
    image_model = LoadedVisionModel(folder, describe_folder(folder), torch.nn.Identity())

    message = "line 1: contains a video, but models of this family are not trained on videos here"
    with pytest.raises(DatasetError, match=message):
        image_model.load_data(write_rows(tmp_path, columns_of("<video>?", videos=["clip.mp4"])))


SDP = (
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
)
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nclip.mp4\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    "content", [SDP, PLAYLIST, b"ffconcat version 1.0\nfile clip.mp4\n"], ids=["sdp", "playlist", "concat"]
)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_containers_that_open_files_or_connections_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, *, as_bytes: bool
) -> None:
    write_clip(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "video.mp4").write_bytes(content)
    source = {"data": content} if as_bytes else {"path": str(tmp_path / "video.mp4")}
    started_at = time.monotonic()

    with pytest.raises(DatasetError, match="Invalid"):
        probe_video(MediaItem(modality=Modality.VIDEO, **source), SHORT_SAMPLING, choose_all)

    assert time.monotonic() - started_at < 5


SHORT_SAMPLING = FrameSampling(fps=2.0, min_frames=4, max_frames=8, min_pixels=1, max_pixels=10**6)


def choose_all(_sampling: FrameSampling, total_frames: int, _fps: float) -> tuple[int, ...]:
    return tuple(range(total_frames))


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi", "a.webm", "a.mov", "a.ts", "a.gif"])
def test_usual_containers_are_read(tmp_path: Path, name: str) -> None:
    codec = {"a.webm": "libvpx", "a.gif": "gif", "a.avi": "mpeg4"}.get(name, "libx264")
    with av.open(str(tmp_path / name), "w") as container:
        stream: Any = container.add_stream(codec, rate=8)
        stream.width = stream.height = 32
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        for shade in range(8):
            image = Image.new("RGB", (32, 32), (30 * shade, 0, 0))
            frame = av.VideoFrame.from_image(image)  # type: ignore[no-untyped-call]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    item = MediaItem(path=str(tmp_path / name), modality=Modality.VIDEO)

    sampled = probe_video(item, SHORT_SAMPLING, choose_all)

    assert len(decode_frames(item, sampled)) == 8
