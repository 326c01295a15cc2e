"""Test the trainer's error classes and the list of user errors in the supervisor."""

import inspect

import pytest

from finetune_supervisor import contract
from finetune_trainer import errors


def list_error_classes() -> dict[str, type]:
    return {name: cls for name, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__}


def test_user_errors_match_the_list_in_the_supervisor() -> None:
    user_errors = {
        name
        for name, cls in list_error_classes().items()
        if issubclass(cls, errors.UserError) and cls is not errors.UserError
    }

    assert len(user_errors) >= 9
    assert user_errors == set(contract.USER_ERRORS)


@pytest.mark.parametrize("name", list_error_classes())
def test_every_error_class_has_a_docstring(name: str) -> None:
    assert list_error_classes()[name].__doc__
