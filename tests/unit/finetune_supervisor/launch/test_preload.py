"""What of a script may be imported before its ranks exist, and when a fork is as good as a new process."""

import ast
import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from finetune_supervisor.launch import preload
from finetune_supervisor.launch.preload import can_fork, leading_imports, preload_script

ALL_AT_ONCE = '''#!/usr/bin/env python
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


def found(source: str) -> list[str]:
    return [ast.unparse(statement) for statement in leading_imports(source)]


def test_imports_of_familiar_libraries_are_found_among_harmless_statements() -> None:
    assert found(ALL_AT_ONCE) == [
        "import numpy as np",
        "import torch.distributed as dist",
        "from torch.nn.parallel import DistributedDataParallel",
        "from transformers import Trainer, TrainingArguments",
    ]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param('import os\nos.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"', id="variable"),
        pytest.param('import os\nos.environ.setdefault("TORCH_LOGS", "+dynamo")', id="a call"),
        pytest.param("import settings", id="a module of the user's own"),
        pytest.param("from . import settings", id="a relative one"),
        pytest.param("import torch, settings", id="both in one statement"),
        pytest.param("if True:\n    pass", id="a branch"),
        pytest.param("try:\n    import torch\nexcept ImportError:\n    torch = None", id="an attempt"),
        pytest.param("here = __file__.upper()", id="a value that is made"),
        pytest.param("import dotenv", id="a library that is not familiar"),
    ],
)
def test_whatever_might_matter_to_an_import_ends_the_search(first: str) -> None:
    assert found(f"import numpy\n{first}\nimport torch\n") == ["import numpy"]


def test_a_script_that_is_no_python_is_left_to_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nthis is no Python")
    preload_script(script)
    preload_script(tmp_path / "missing.py")


def test_only_the_imports_of_a_script_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "familiar"
    library.mkdir()
    (library / "__init__.py").write_text("value = 1\n")
    (library / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(preload, "FAMILIAR", frozenset({"familiar", "nowhere"}))
    script = tmp_path / "train.py"
    script.write_text(f"from familiar import part\nimport nowhere\nopen({str(tmp_path / 'ran')!r}, 'w')\n")

    preload_script(script)

    assert "familiar.part" in sys.modules
    assert not (tmp_path / "ran").exists()


def test_of_what_optimizers_import_nothing_comes_early_that_keeps_a_process_group(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    program = f"""
import pathlib, sys
from finetune_supervisor.launch.preload import preload_script
preload_script(pathlib.Path({str(script)!r}))
print(*(name in sys.modules for name in ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert said.stdout.split() == ["True", "False", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks its ranks")
def test_a_process_with_another_thread_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert can_fork()
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert not can_fork()


class Driver:
    """libcuda, as far as it is asked."""

    def __init__(self, says: int) -> None:
        self._says = says

    def cuDeviceGetCount(self, _count: object) -> int:  # noqa: N802  its name
        return self._says


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks its ranks")
@pytest.mark.parametrize(("says", "may"), [(3, True), (0, False), (100, False)])
def test_a_process_that_has_begun_to_use_cuda_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, says: int, may: bool
) -> None:
    """3 is CUDA_ERROR_NOT_INITIALIZED, which the driver answers to whoever has not called cuInit."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Driver(says))

    assert can_fork() is may
