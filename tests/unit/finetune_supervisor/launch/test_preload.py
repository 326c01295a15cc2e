"""Tests of preloading libraries in the launcher and of the conditions for forking it."""

import ast
import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from finetune_supervisor.launch import preload
from finetune_supervisor.launch.preload import can_fork_safely, find_leading_imports, preload_script

HARMLESS_SCRIPT = '''#!/usr/bin/env python
"""Trains."""
from __future__ import annotations

import argparse, os
import sys
__package__ = "trainer"
sys.path.append("..")
import warnings
warnings.filterwarnings("ignore")
import numpy as np
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import (Trainer,
                          TrainingArguments)
'''


def list_leading_imports(source: str) -> list[str]:
    return [ast.unparse(statement) for statement in find_leading_imports(source)]


def test_library_imports_between_harmless_statements_are_found() -> None:
    assert list_leading_imports(HARMLESS_SCRIPT) == [
        "import numpy as np",
        "import torch.distributed as dist",
        "from torch.nn.parallel import DistributedDataParallel",
        "from transformers import Trainer, TrainingArguments",
    ]


@pytest.mark.parametrize(
    "first_statement",
    [
        pytest.param(
            'import os\nos.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"', id="environment variable"
        ),
        pytest.param('import os\nos.environ.setdefault("TORCH_LOGS", "+dynamo")', id="call"),
        pytest.param("import settings", id="user module"),
        pytest.param("from . import settings", id="relative import"),
        pytest.param("import torch, settings", id="known and user module"),
        pytest.param("if True:\n    pass", id="branch"),
        pytest.param("try:\n    import torch\nexcept ImportError:\n    torch = None", id="try statement"),
        pytest.param("path = __file__.upper()", id="computed value"),
        pytest.param("import dotenv", id="other library"),
    ],
)
def test_leading_imports_end_at_a_statement_that_could_affect_imports(first_statement: str) -> None:
    assert list_leading_imports(f"import numpy\n{first_statement}\nimport torch\n") == ["import numpy"]


def test_invalid_or_missing_script_raises_no_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nthis is no Python")
    preload_script(script)
    preload_script(tmp_path / "missing.py")


def test_only_the_imports_of_a_script_are_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "known_library"
    library.mkdir()
    (library / "__init__.py").write_text("value = 1\n")
    (library / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(preload, "PRELOADABLE_LIBRARIES", frozenset({"known_library", "nowhere"}))
    script = tmp_path / "train.py"
    script.write_text(f"from known_library import part\nimport nowhere\nopen({str(tmp_path / 'ran')!r}, 'w')\n")

    preload_script(script)

    assert "known_library.part" in sys.modules
    assert not (tmp_path / "ran").exists()


def test_modules_that_reference_the_process_group_are_not_preloaded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    program = f"""
import pathlib, sys
from finetune_supervisor.launch.preload import preload_script
preload_script(pathlib.Path({str(script)!r}))
print(*(name in sys.modules for name in ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")))
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert process.stdout.split() == ["True", "False", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks its ranks")
def test_process_with_another_thread_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert can_fork_safely()
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert not can_fork_safely()


class FakeCudaDriver:
    """Fake libcuda whose cuDeviceGetCount returns a fixed result."""

    def __init__(self, result: int) -> None:
        self._result = result

    def cuDeviceGetCount(self, _count: object) -> int:  # noqa: N802  name of the C function
        return self._result


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks its ranks")
@pytest.mark.parametrize(("result", "can_fork"), [(3, True), (0, False), (100, False)])
def test_process_with_initialized_cuda_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, result: int, can_fork: bool
) -> None:
    """Result 3 is CUDA_ERROR_NOT_INITIALIZED, returned in a process that has not called cuInit."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: FakeCudaDriver(result))

    assert can_fork_safely() is can_fork
