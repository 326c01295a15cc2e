"""Convert scikit-learn's 1,797 handwritten digits to chat rows with images."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from testing.models import tiny_text

_HELD_OUT_COUNT = 297
_IMAGE_SIZE = 28  # width and height in pixels; such an image is one token of Qwen2-VL
_MAX_BRIGHTNESS = 16


@dataclass(frozen=True)
class Digits:
    """Paths of the training and held-out rows, and the held-out accuracy (0 to 1) of a linear probe on the pixels."""

    train: Path
    held_out: Path
    linear_probe_accuracy: float


def build(folder: Path) -> Digits:
    folder.mkdir(parents=True)
    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    pixels, digits = pixels[order] / _MAX_BRIGHTNESS, digits[order]
    rows = [_write_row(folder, number, *pair) for number, pair in enumerate(zip(pixels, digits, strict=True))]
    files = Digits(
        folder / "train.jsonl",
        folder / "held-out.jsonl",
        float(
            LogisticRegression(max_iter=500)
            .fit(pixels[_HELD_OUT_COUNT:], digits[_HELD_OUT_COUNT:])
            .score(pixels[:_HELD_OUT_COUNT], digits[:_HELD_OUT_COUNT])
        ),
    )
    tiny_text.write_jsonl(files.held_out, rows[:_HELD_OUT_COUNT])
    tiny_text.write_jsonl(files.train, rows[_HELD_OUT_COUNT:])
    return files


def _write_row(
    folder: Path, number: int, pixels: "np.ndarray[tuple[int], np.dtype[np.float64]]", digit: int
) -> tiny_text.Row:
    name = f"{number}.png"
    Image.fromarray((pixels.reshape(8, 8) * 255).astype(np.uint8)).resize((_IMAGE_SIZE, _IMAGE_SIZE)).save(
        folder / name
    )
    question = {"role": "user", "content": "<image>digit?"}
    return {"messages": [question, {"role": "assistant", "content": str(digit)}], "images": [name]}
