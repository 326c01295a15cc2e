"""Test that only the libraries that the spec needs can be imported."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.lazy_imports import hide_unused_libraries, may_use_gpu_on_import

HIDEABLE = ("bitsandbytes", "datasets", "deepspeed", "scipy")
QUANTIZED = {"lora": {"quantization": "nf4"}}


@pytest.fixture(autouse=True)
def _unload_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in HIDEABLE:
        monkeypatch.setitem(sys.modules, module, None)  # monkeypatch restores the original entry after the test
        del sys.modules[module]


@pytest.mark.parametrize(
    ("spec", "needed_libraries"),
    [
        pytest.param(QUANTIZED, {"bitsandbytes"}, id="quantized lora"),
        pytest.param({"lora": {"quantization": None}}, set(), id="lora with null quantization"),
        pytest.param({"lora": {}}, set(), id="lora"),
        pytest.param({"training": {"optim": "adamw_8bit"}}, {"bitsandbytes"}, id="moments in 8 bits"),
        pytest.param({"training": {"optim": "adamw_torch_fused"}}, set(), id="moments in float32"),
        pytest.param({"lora": None, "deepspeed": None}, set(), id="null fields"),
        pytest.param({"deepspeed": {"preset": "zero2"}}, {"deepspeed"}, id="deepspeed preset"),
        pytest.param(
            {"deepspeed": {"config": {"zero_optimization": {"stage": 1}}}}, {"deepspeed"}, id="deepspeed config"
        ),
        pytest.param(
            {**QUANTIZED, "deepspeed": {"preset": "zero1"}},
            {"bitsandbytes", "deepspeed"},
            id="quantized lora with deepspeed",
        ),
        pytest.param({}, set(), id="empty spec"),
    ],
)
def test_only_needed_libraries_can_be_imported(
    tmp_path: Path, spec: dict[str, Any], needed_libraries: set[str]
) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    hide_unused_libraries(tmp_path / "spec.json")

    assert {module for module in HIDEABLE if importlib.util.find_spec(module) is not None} == needed_libraries
    assert may_use_gpu_on_import(tmp_path / "spec.json") is bool(needed_libraries)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="missing file"),
        pytest.param("{", id="invalid JSON"),
        pytest.param("[]", id="not an object"),
    ],
)
def test_no_library_is_hidden_if_the_spec_is_unreadable(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "spec.json").write_text(content)

    hide_unused_libraries(tmp_path / "spec.json")
