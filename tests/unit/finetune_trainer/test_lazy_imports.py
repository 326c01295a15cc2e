"""What a job does not import."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.lazy_imports import hide_what_is_not_needed, uses_gpus_when_imported

HIDDEN = ("bitsandbytes", "datasets", "deepspeed", "scipy")
QUANTIZED = {"lora": {"quantization": "nf4"}}


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in HIDDEN:
        monkeypatch.setitem(sys.modules, module, None)  # so that it is put back as it was
        del sys.modules[module]


@pytest.mark.parametrize(
    ("spec", "needed"),
    [
        (QUANTIZED, {"bitsandbytes"}),
        ({"lora": {"quantization": None}}, set()),
        ({"lora": {}}, set()),
        ({"lora": None, "deepspeed": None}, set()),
        ({"deepspeed": {"preset": "zero2"}}, {"deepspeed"}),
        ({"deepspeed": {"config": {"zero_optimization": {"stage": 1}}}}, {"deepspeed"}),
        ({**QUANTIZED, "deepspeed": {"preset": "zero1"}}, {"bitsandbytes", "deepspeed"}),
        ({}, set()),
    ],
)
def test_a_rank_sees_the_libraries_that_its_job_needs(tmp_path: Path, spec: dict[str, Any], needed: set[str]) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    hide_what_is_not_needed(tmp_path / "spec.json")

    assert {module for module in HIDDEN if importlib.util.find_spec(module) is not None} == needed
    assert uses_gpus_when_imported(tmp_path / "spec.json") is bool(needed), "what is left may take hold of a GPU"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_spec_that_cannot_be_read_is_left_to_the_trainer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "spec.json").write_text(content)

    hide_what_is_not_needed(tmp_path / "spec.json")
