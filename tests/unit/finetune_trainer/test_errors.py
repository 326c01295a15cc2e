"""The error classes of the trainer, and their lists in the supervisor and the API."""

import inspect

import pytest

from finetune_supervisor import contract
from finetune_trainer import errors


def error_classes() -> dict[str, type]:
    return {name: cls for name, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__}


def test_trainer_supervisor_and_operator_agree_on_the_errors_that_are_never_retried() -> None:
    user_errors = {
        name
        for name, cls in error_classes().items()
        if issubclass(cls, errors.UserError) and cls is not errors.UserError
    }

    assert len(user_errors) >= 9
    assert user_errors == set(contract.USER_ERRORS)


@pytest.mark.parametrize("name", error_classes())
def test_every_error_class_documents_when_it_is_raised(name: str) -> None:
    assert error_classes()[name].__doc__
