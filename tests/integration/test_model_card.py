"""Tests the model card and the summary of the report after real trainings, and runs the code of the card."""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from testing.models import tiny_text, tiny_vision
from testing.processes.launches import run_cells

pytestmark = pytest.mark.slow

STEPS = 4
LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
}


def build_spec(model: Path, rows: Path, **fields: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(model)},
        "dataset": {"train": [{"name": str(rows)}], "eval": [{"name": str(rows)}], "numWorkers": 0},
        "sft": {},
        "training": {"perDeviceTrainBatchSize": 2, "maxSteps": STEPS, "evalSteps": 2, "saveSteps": 2},
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
        **fields,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a text adapter, a full model, a preference adapter and a vision adapter; return the folder of the cells."""
    folder = tmp_path_factory.mktemp("cards")
    text = tiny_text.build(folder / "text", rows=32, eval_rows=8)
    vision = tiny_vision.build(folder / "llava", "llava")
    (vision / "processor_config.json").write_text(json.dumps(LLAVA_PROCESSOR))
    images = tiny_vision.write_rows(folder / "images", 16)
    pairs = tiny_text.get_preferences_path(text.train)
    cells = {
        "adapter": build_spec(text.model, text.train, lora={}),
        "full": build_spec(text.model, text.train),
        "dpo": build_spec(text.model, pairs, sft=None, dpo={}, lora={}),
        "vision": build_spec(vision, images, lora={}),
        "adapter (from step 2)": build_spec(text.model, text.train, lora={}),
    }
    run_cells(folder / "cells", cells, ranks=1, forecasts=True)
    return folder / "cells"


@pytest.mark.parametrize(
    ("cell", "library", "task", "tags"),
    [
        ("adapter", "peft", "text-generation", {"sft", "lora"}),
        ("full", "transformers", "text-generation", {"sft"}),
        ("dpo", "peft", "text-generation", {"dpo", "lora"}),
        ("vision", "peft", "image-text-to-text", {"sft", "lora"}),
    ],
)
def test_a_result_has_a_model_card_whose_code_loads_it(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str, library: str, task: str, tags: set[str]
) -> None:
    result = results / cell / "result"
    card = ModelCard.load(result / "README.md")
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    tiny_vision.write_image(tmp_path, "image.png", (56, 56), seed=0)
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}

    exec(code.replace('result = "."', f"result = {str(result)!r}"), variables)  # noqa: S102

    assert (card.data.library_name, card.data.pipeline_tag) == (library, task)
    assert set(card.data.tags) == {"finetune-operator", *tags}
    assert variables["output"].shape[1] > variables["inputs"]["input_ids"].shape[1]
    assert "[More Information Needed]" not in card.content


def test_the_card_contains_the_sha256_of_the_rows(results: Path) -> None:
    rows = results.parent / "text" / "train.jsonl"

    assert sha256(rows.read_bytes()).hexdigest() in (results / "adapter/result/README.md").read_text()


def test_the_report_opens_with_the_outcome_and_the_memory(results: Path) -> None:
    page = (results / "adapter/result/report.html").read_text()

    summary = page[page.index('<section class="summary">') : page.index("</section>")]
    for text in (
        f"completed {STEPS} of {STEPS} steps",
        "eval_loss",
        "of the forecast of",
        "useful",
        "starting",
        "lost",
    ):
        assert text in summary
