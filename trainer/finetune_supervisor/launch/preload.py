"""Imports common libraries in the launcher before it forks the ranks, to save seconds and memory per rank.

Only imports with the same effect in launcher and rank are run early: well-known libraries that the script imports
before any statement that could affect them, and one torch module that the first optimizer imports anyway.

torch._dynamo, which optimizers also import, is not loaded early. It imports torch.distributed.fsdp, whose functions use
the process group that exists at import time as a default argument. Scripts usually create their group before the
optimizer, so this reference keeps the group alive until exit. After an early import the group would be destroyed, and
gloo's destructor in torch 2.13 often deadlocks: it holds the GIL while it joins a thread that needs the GIL to release
the context of a backward pass.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

PRELOADABLE_LIBRARIES = frozenset(
    {"accelerate", "datasets", "numpy", "peft", "safetensors", "torch", "transformers", "trl"}
)
# Python 3.9 has no list of all; there, fewer scripts are preloaded.
_STANDARD_MODULES = frozenset(getattr(sys, "stdlib_module_names", sys.builtin_module_names))
_HARMLESS_CALLS = ("sys.path.append", "sys.path.insert", "warnings.filterwarnings", "warnings.simplefilter")
_CUDA_ERROR_NOT_INITIALIZED = 3
_OPTIMIZER_DEPENDENCY = "torch.distributed.tensor"  # importing this module and sympy takes 0.5 s of CPU time


def preload_script(script: Path) -> None:
    """Run the leading imports of the script, and import a dependency of optimizers.

    Errors are ignored, because the import fails again in the rank, which reports the error.
    """
    with contextlib.suppress(Exception):
        for statement in find_leading_imports(script.read_text(encoding="utf-8")):
            exec(compile(ast.Module([statement], []), str(script), "exec"), {})  # noqa: S102  import statement of the script
    if "torch" in sys.modules:
        with contextlib.suppress(Exception):
            importlib.import_module(_OPTIMIZER_DEPENDENCY)


def find_leading_imports(source: str) -> Iterator[ast.stmt]:
    """Yield imports of preloadable libraries up to the first statement that could affect them.

    Such a statement may set an environment variable. Raises: SyntaxError.
    """
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            roots = set(_list_imported_packages(statement))
            if roots <= PRELOADABLE_LIBRARIES:
                yield statement
            elif not roots <= _STANDARD_MODULES:
                return
        elif not _is_harmless(statement):
            return


def can_fork_safely() -> bool:
    """Return whether this process has no other Python threads and uses no GPU, so that it can be forked safely."""
    return sys.platform == "linux" and threading.active_count() == 1 and not _is_gpu_in_use()


def _list_imported_packages(statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (name.name.partition(".")[0] for name in statement.names)
    else:
        yield "" if statement.level else (statement.module or "").partition(".")[0]


def _is_harmless(statement: ast.stmt) -> bool:
    """Return whether a statement cannot affect imports, such as a constant or a warning filter."""
    if isinstance(statement, ast.Assign):
        return isinstance(statement.value, ast.Constant) and all(
            isinstance(target, ast.Name) for target in statement.targets
        )
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call) and ast.unparse(value.func) in _HARMLESS_CALLS
    )


def _is_gpu_in_use() -> bool:
    """Return whether this process has initialized CUDA or HIP; a fork of such a process cannot use the GPU."""
    with contextlib.suppress(OSError):  # the driver is not loaded
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        if cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED:
            return True
    return any(_read_link(link) == "/dev/kfd" for link in Path("/proc/self/fd").iterdir())


def _read_link(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the descriptor used to list the folder is already closed
        return ""
