"""Releases of the operator that run in one simulated cluster: this tree, and this tree with the edits of a next one."""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

from testing.simulator.world import operator_process
from testing.simulator.world.operator_process import ProcessEnvironment, SimulatedOperator
from testing.upgrade.next_release import NEXT_RELEASE_EDITS

REPOSITORY = Path(__file__).resolve().parents[3]
PROCESS_MODULES = ("testing.simulator.world.operator_process", "testing.simulator.world.operator_connection")
PACKAGES = ("finetune_operator", "finetune_api")


@dataclass(frozen=True)
class OperatorRelease:
    """A release of the operator: the class that runs its code, and the version and trainer image of its settings."""

    start: Callable[[ProcessEnvironment], SimulatedOperator]
    version: str
    trainer_image: str


THIS_RELEASE = OperatorRelease(SimulatedOperator, "0.1.0", "registry.example/trainer:v1")


class EditingLoader(SourceFileLoader):
    """Loader that compiles the source of a module with the edits of the next release."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the module, without the bytecode cache."""
        path = Path(self.get_filename(fullname))
        source, count = path.read_text(), 0
        for name, text, replacement in NEXT_RELEASE_EDITS:
            if path == REPOSITORY / name:
                count = source.count(text)
                assert count == 1, f"{name} contains {text!r} {count} times; adapt the edit"
                source = source.replace(text, replacement)
        return compile(source, str(path), "exec", dont_inherit=True)


class EditingFinder(MetaPathFinder):
    """Finder that loads the packages of the operator with EditingLoader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the operator, None for other modules."""
        if not _belongs_to_release(fullname):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = EditingLoader(fullname, spec.origin)
        return spec


@functools.cache
def load_next_release() -> OperatorRelease:
    """Import the operator a second time, with the edits of the next release, beside the modules of this tree."""
    kept = {name: module for name, module in sys.modules.items() if _belongs_to_release(name)}
    finder = EditingFinder()
    with (
        mock.patch.dict(sys.modules),
        mock.patch.object(sys, "meta_path", [finder, *sys.meta_path]),
        mock.patch.object(sys.modules["testing.simulator.world"], "operator_process", operator_process),
        mock.patch.object(
            sys.modules["testing.simulator.world"],
            "operator_connection",
            sys.modules["testing.simulator.world.operator_connection"],
        ),
    ):
        for name in kept:
            del sys.modules[name]
        module = importlib.import_module(operator_process.__name__)
        patched: Any = sys.modules["finetune_operator.manager.manager"]
        patched.exit_immediately = module.exit_immediately
    return OperatorRelease(module.SimulatedOperator, "0.2.0", "registry.example/trainer:v2")


def _belongs_to_release(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES or name in PROCESS_MODULES
