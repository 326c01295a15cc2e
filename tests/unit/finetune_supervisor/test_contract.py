import ast
from pathlib import Path
from typing import Any

import pytest

import finetune_supervisor as supervisor
from finetune_supervisor.contract import EnvironmentProblem, Node

MODULES = sorted(Path(supervisor.__file__).parent.rglob("*.py"))
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


def test_a_node_is_read_from_the_environment_with_its_defaults() -> None:
    node = Node.from_environment(ENVIRONMENT)

    assert (node.attempt, node.node_rank, node.nodes, node.world_size) == (2, 3, 4, 8)
    assert node.global_rank(1) == 7
    assert node.termination_log == Path("/dev/termination-log")
    assert (node.status_port, node.grace_seconds) == (8080, 120)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"MASTER_ADDR": ""}, "MASTER_ADDR is missing"), ({"NNODES": "two"}, "NNODES must be a whole number, not 'two'")],
)
def test_a_variable_that_is_wrong_is_named(changed: dict[str, str], message: str) -> None:
    with pytest.raises(EnvironmentProblem, match=message):
        Node.from_environment({**ENVIRONMENT, **changed})


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_the_supervisor_can_be_read_by_python_3_9(path: Path) -> None:
    """It may be dropped into an image with an older Python: no newer syntax, no evaluated `X | Y`, no other package."""
    tree: Any = ast.parse(path.read_text(), feature_version=(3, 9))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]

    assert len(MODULES) >= 9
    assert path.name == "__init__.py" or any(node.module == "__future__" for node in imports)
    absolute = {
        node.module
        for node in imports
        if (node.module or "").startswith(("finetune", "contract"))
        and not (node.module or "").startswith("finetune_supervisor")
    }
    assert not absolute, "only what lies beside it in the one file"
    assert not any(isinstance(node, ast.Match) for node in ast.walk(tree))
