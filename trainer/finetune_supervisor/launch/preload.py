"""Imports common libraries once in the launcher, before the ranks are forked; saves seconds and memory per rank.

Only imports that behave the same in launcher and rank qualify: well-known libraries that the script imports before any
statement that could change how they load, and the part of torch that the first optimizer imports in any case.

Not all of what an optimizer imports: torch._dynamo imports torch.distributed.fsdp, whose functions have the process
group that exists at import time as a default argument. A script usually creates its group before the optimizer, so that
this reference keeps the group alive and it is never destroyed. After an early import it would be, and gloo's destructor
in torch 2.13 often deadlocks: it holds the GIL while it joins a thread that needs the GIL to release the context of a
backward pass.
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
_HARMLESS_CALLS = ("sys.path.append", "sys.path.insert", "warnings.filterwarnings", "warnings.simplefilter")
_CUDA_ERROR_NOT_INITIALIZED = 3
_NEEDED_BY_OPTIMIZERS = "torch.distributed.tensor"  # takes 0.5 s of CPU time, with sympy


def preload_script(script: Path) -> None:
    """Run the leading imports of the script, and import what optimizers need.

    Errors are ignored: the import fails again in the rank, which reports it.
    """
    with contextlib.suppress(Exception):
        for statement in find_leading_imports(script.read_text(encoding="utf-8")):
            exec(compile(ast.Module([statement], []), str(script), "exec"), {})  # noqa: S102  an import of the script
    if "torch" in sys.modules:
        with contextlib.suppress(Exception):
            importlib.import_module(_NEEDED_BY_OPTIMIZERS)


def find_leading_imports(source: str) -> Iterator[ast.stmt]:
    """Yield imports of preloadable libraries up to the first statement that could affect them, such as setting an
    environment variable. Raises SyntaxError."""
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            roots = set(_roots(statement))
            if roots <= PRELOADABLE_LIBRARIES:
                yield statement
            elif not roots <= _standard_library():
                return
        elif not _is_harmless(statement):
            return


def can_fork_safely() -> bool:
    """Return whether a fork behaves like a new process: no other Python thread, and no GPU in use."""
    return sys.platform == "linux" and threading.active_count() == 1 and not _gpu_is_in_use()


def _roots(statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (name.name.partition(".")[0] for name in statement.names)
    else:
        yield "" if statement.level else (statement.module or "").partition(".")[0]


def _standard_library() -> frozenset[str]:
    """Return the names of standard-library modules; only common ones on Python 3.9, which has no list of them."""
    common = (
        "__future__",
        "argparse",
        "collections",
        "dataclasses",
        "functools",
        "gc",
        "json",
        "logging",
        "math",
        "os",
    )
    more = ("pathlib", "random", "re", "signal", "sys", "time", "typing", "warnings", "contextlib", "datetime")
    return frozenset(getattr(sys, "stdlib_module_names", (*common, *more)))


def _is_harmless(statement: ast.stmt) -> bool:
    """Return whether a statement cannot affect imports: docstring, constant, entry of sys.path, warning filter."""
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


def _gpu_is_in_use() -> bool:
    """Return whether CUDA or HIP is initialized in this process; a fork could not use it then."""
    with contextlib.suppress(OSError):  # the driver is not loaded
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        if cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED:
            return True
    return any(_read_link(link) == "/dev/kfd" for link in Path("/proc/self/fd").iterdir())


def _read_link(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the descriptor that listed the folder, already closed
        return ""
