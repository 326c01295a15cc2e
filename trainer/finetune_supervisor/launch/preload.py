"""What the ranks of a node would each import is imported once, before they are forked: seconds, and memory, per rank.

Only what cannot tell a rank from the launcher: libraries that everybody knows, which a script imports before it does
anything that could change how they load. And a part of torch that the first optimizer imports, whoever makes it.

Not all that it imports: functions of torch.distributed.fsdp, which torch._dynamo needs, have the process group of the
moment of their import as a default. As a rule that is made before the optimizer, and so is never destroyed. Under gloo
the destructor in torch 2.13 often waits for ever: it has the GIL, and joins a thread that wants it, to let go of the
context of a backward pass.
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

FAMILIAR = frozenset({"accelerate", "datasets", "numpy", "peft", "safetensors", "torch", "transformers", "trl"})
_HARMLESS_CALLS = ("sys.path.append", "sys.path.insert", "warnings.filterwarnings", "warnings.simplefilter")
_CUDA_ERROR_NOT_INITIALIZED = 3
_NEEDED_BY_OPTIMIZERS = "torch.distributed.tensor"  # half of a second of CPU, sympy included


def preload_script(script: Path) -> None:
    """Import what the script begins with, and more of torch; what fails here fails again in the rank, which says so."""
    with contextlib.suppress(Exception):
        for statement in leading_imports(script.read_text(encoding="utf-8")):
            exec(compile(ast.Module([statement], []), str(script), "exec"), {})  # noqa: S102  an import that it makes
    if "torch" in sys.modules:
        with contextlib.suppress(Exception):
            importlib.import_module(_NEEDED_BY_OPTIMIZERS)


def leading_imports(source: str) -> Iterator[ast.stmt]:
    """Imports of familiar libraries until the first statement that might matter to them, such as a new variable of
    the environment. Raises SyntaxError."""
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            roots = set(_roots(statement))
            if roots <= FAMILIAR:
                yield statement
            elif not roots <= _standard():
                return
        elif not _is_harmless(statement):
            return


def can_fork() -> bool:
    """Whether a copy of this process is as good as a new one: no other thread of Python's, and no GPU in use."""
    return sys.platform == "linux" and threading.active_count() == 1 and not _gpu_is_in_use()


def _roots(statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (name.name.partition(".")[0] for name in statement.names)
    else:
        yield "" if statement.level else (statement.module or "").partition(".")[0]


def _standard() -> frozenset[str]:
    """Modules of Python's own; of Python 3.9, which has no list of them, those that scripts begin with."""
    few = ("__future__", "argparse", "collections", "dataclasses", "functools", "gc", "json", "logging", "math", "os")
    more = ("pathlib", "random", "re", "signal", "sys", "time", "typing", "warnings", "contextlib", "datetime")
    return frozenset(getattr(sys, "stdlib_module_names", (*few, *more)))


def _is_harmless(statement: ast.stmt) -> bool:
    """A docstring, a name for a constant, a path or a filter of warnings."""
    if isinstance(statement, ast.Assign):
        return isinstance(statement.value, ast.Constant) and all(isinstance(to, ast.Name) for to in statement.targets)
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call) and ast.unparse(value.func) in _HARMLESS_CALLS
    )


def _gpu_is_in_use() -> bool:
    """CUDA and HIP cannot be used by the children of a process that has begun to use them."""
    with contextlib.suppress(OSError):  # which says that nobody has loaded it
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        if cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED:
            return True
    return any(_target(link) == "/dev/kfd" for link in Path("/proc/self/fd").iterdir())


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the folder's own, which is closed by now
        return ""
