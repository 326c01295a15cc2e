"""Tests of the supervisor's environment variables and of its compatibility with old Python versions."""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import finetune_supervisor
from finetune_supervisor.contract import InvalidEnvironment, Node, parse_json

MODULES = sorted(Path(finetune_supervisor.__file__).parent.rglob("*.py"))
ENVIRONMENT = {
    "FINETUNE_NAMESPACE": "default",
    "FINETUNE_JOB": "bert",
    "FINETUNE_JOB_UID": "ours",
    "FINETUNE_ATTEMPT": "2",
    "FINETUNE_WORLD_SIZE": "8",
    "FINETUNE_OUTPUT": "/output/default/bert",
    "FINETUNE_RUN_DIR": "/run/finetune",
    "MASTER_ADDR": "bert-2-0.bert",
    "MASTER_PORT": "29500",
    "NNODES": "4",
    "NODE_RANK": "3",
    "NPROC_PER_NODE": "2",
}


def test_node_is_read_from_the_environment_with_defaults() -> None:
    node = Node.from_environment(ENVIRONMENT)

    assert (node.attempt, node.node_rank, node.num_nodes, node.world_size) == (2, 3, 4, 8)
    assert node.to_global_rank(1) == 7
    assert node.termination_log == Path("/dev/termination-log")
    assert (node.status_port, node.grace_seconds) == (8080, 120)


@pytest.mark.parametrize(
    ("changed_variables", "message"),
    [({"MASTER_ADDR": ""}, "MASTER_ADDR is missing"), ({"NNODES": "two"}, "NNODES must be a whole number, not 'two'")],
)
def test_invalid_variable_is_named_in_the_error(changed_variables: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidEnvironment, match=message):
        Node.from_environment({**ENVIRONMENT, **changed_variables})


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module_supports_python_3_9_and_imports_only_the_standard_library(path: Path) -> None:
    """The operator mounts the supervisor into images that may have an old Python and no other packages."""
    tree: Any = ast.parse(path.read_text(), feature_version=(3, 9))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]

    assert len(MODULES) >= 20
    assert path.name == "__init__.py" or any(node.module == "__future__" for node in imports)
    packages = {(node.module or "").partition(".")[0] for node in imports}
    packages |= {
        name.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    assert packages <= {*sys.stdlib_module_names, "finetune_supervisor", "torch"}, (
        "the bundle contains no other package"
    )
    assert not any(isinstance(node, ast.Match) for node in ast.walk(tree))


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, b"\xff", "{"], ids=["nested", "digits", "bytes", "end"])
def test_json_that_python_cannot_parse_is_one_kind_of_error(content: str | bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse_json(content)
