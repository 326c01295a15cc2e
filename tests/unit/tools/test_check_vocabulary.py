"""Tests of the vocabulary check: banned words, short docstrings and duplicate class names."""

import ast

import pytest

from check_vocabulary import check_class_names, check_file

PATH = "operator/finetune_operator/core/example.py"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("told = 1", "identifier told: avoid told", id="identifier"),
        pytest.param("class UnheardPod: ...", "identifier UnheardPod: avoid unheard", id="CamelCase word"),
        pytest.param('def f():\n    """Return what the pod says to the operator."""', "avoid says", id="docstring"),
        pytest.param('def f():\n    """Return this one."""', "fewer than 5 words", id="short docstring"),
    ],
)
def test_violation_is_reported_with_path_and_line(source: str, message: str) -> None:
    (problem,) = check_file(PATH, ast.parse(source))

    assert str(problem).startswith(f"{PATH}:1: ")
    assert message in str(problem)


def test_duplicate_class_name_is_reported() -> None:
    (problem,) = check_class_names({"a.py": ast.parse("class Step: ..."), "b.py": ast.parse("class Step: ...")})

    assert str(problem) == "a.py:1: class Step is also defined in b.py"
