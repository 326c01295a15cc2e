import inspect

import pytest

from finetune_api import termination
from finetune_supervisor import contract
from finetune_trainer import errors


def classes() -> dict[str, type]:
    return {
        name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__
    }


def test_trainer_supervisor_and_operator_agree_on_what_a_restart_cannot_mend() -> None:
    for_good = {
        name for name, kind in classes().items() if issubclass(kind, errors.UserError) and kind is not errors.UserError
    }

    assert len(for_good) >= 9
    assert for_good == set(contract.USER_ERRORS) == set(termination.USER_ERRORS)


@pytest.mark.parametrize("name", classes())
def test_every_error_says_when_it_is_raised(name: str) -> None:
    assert classes()[name].__doc__
