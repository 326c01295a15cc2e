"""scikit-learn's 1,797 hand-written digits as questions about images."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from testing.models import tiny_text as tiny

_HELD_OUT = 297
_EDGE = 28  # one token of Qwen2-VL
_BRIGHTEST = 16


@dataclass(frozen=True)
class Digits:
    """Rows to learn from, others to be asked, and the share of those that a linear probe of the pixels answers."""

    train: Path
    held_out: Path
    linear_probe: float


def build(folder: Path) -> Digits:
    folder.mkdir(parents=True)
    pixels, answers = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    pixels, answers = pixels[order] / _BRIGHTEST, answers[order]
    rows = [_row(folder, number, *pair) for number, pair in enumerate(zip(pixels, answers, strict=True))]
    built = Digits(
        folder / "train.jsonl",
        folder / "held-out.jsonl",
        float(
            LogisticRegression(max_iter=500)
            .fit(pixels[_HELD_OUT:], answers[_HELD_OUT:])
            .score(pixels[:_HELD_OUT], answers[:_HELD_OUT])
        ),
    )
    tiny.write_jsonl(built.held_out, rows[:_HELD_OUT])
    tiny.write_jsonl(built.train, rows[_HELD_OUT:])
    return built


def _row(folder: Path, number: int, pixels: "np.ndarray[tuple[int], np.dtype[np.float64]]", answer: int) -> tiny.Row:
    name = f"{number}.png"
    Image.fromarray((pixels.reshape(8, 8) * 255).astype(np.uint8)).resize((_EDGE, _EDGE)).save(folder / name)
    asked = {"role": "user", "content": "<image>digit?"}
    return {"messages": [asked, {"role": "assistant", "content": str(answer)}], "images": [name]}
