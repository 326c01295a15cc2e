"""Tests of `make check-convert-corpus`, which calls the parsers of the tools, without their environments."""

import pytest

from lockfile import read_locks
from option_tables import SOURCES
from testing.convert_corpus.__main__ import CORPUS, ENVIRONMENTS, OWN_PACKAGES, ParserResult
from testing.convert_corpus.parser_calls import NOT_PARSED, REJECTED, ParserCall, list_calls
from testing.convert_corpus.tool_parser import PARSERS, find_error
from testing.peer_environment import read_version

INPUTS = sorted(CORPUS.iterdir())
OWN_PARSERS = ("torchrun", "torch.distributed.launch", "accelerate", "deepspeed")


def test_every_input_has_a_parser_or_a_reason() -> None:
    without_calls = {path.name for path in INPUTS if not list_calls(path)}

    assert without_calls == NOT_PARSED.keys()
    assert REJECTED.keys() < {path.name for path in INPUTS} - without_calls
    assert len(INPUTS) - len(without_calls) - len(REJECTED) >= 60


def test_every_parser_has_an_input_and_an_environment() -> None:
    assert {call.parser for path in INPUTS for call in list_calls(path)} == PARSERS.keys()
    assert PARSERS.keys() == {*ENVIRONMENTS, *OWN_PARSERS}
    assert OWN_PACKAGES.keys() < {*OWN_PARSERS}


def test_option_tables_and_parsers_have_the_same_versions() -> None:
    wheels = {name: source.wheels for name, source in SOURCES.items()}

    assert wheels.keys() == ENVIRONMENTS.keys()
    for parser, (tool, lock) in ENVIRONMENTS.items():
        assert wheels[parser][0] == f"{tool}=={read_version(tool, lock)}"
        versions = {package.name: package.version for package in read_locks((lock,))}
        assert all(versions["transformers"] == wheel.partition("==")[2] for wheel in wheels[parser][1:])


def test_a_launcher_and_its_program_have_one_call_each() -> None:
    calls = list_calls(CORPUS / "swift3-torchrun-cli.sh")

    assert [(call.parser, call.content[0]) for call in calls if isinstance(call.content, list)] == [
        ("torchrun", "--nproc_per_node=8"),
        ("swift-3", "sft"),
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(["--nnodes", "2", "train.py", "--lr", "1"], "", id="accepted"),
        pytest.param(["--nodes_of_job", "2", "train.py"], "exit code 2: ", id="unknown option"),
        pytest.param(["--max-restarts", "many", "train.py"], "exit code 2: argument --max-restarts", id="no number"),
    ],
)
def test_the_error_of_a_parser_is_returned(arguments: list[str], error: str) -> None:
    found = find_error(PARSERS["torchrun"], arguments)

    assert found.startswith(error) if error else not found


@pytest.mark.parametrize(
    ("name", "error", "is_expected"),
    [
        pytest.param("swift4-lora.sh", "", True, id="accepted"),
        pytest.param("swift4-lora.sh", "no such option", False, id="rejected"),
        pytest.param("swift3-unknown-options.sh", "no such option", True, id="wrong on purpose"),
        pytest.param("swift3-unknown-options.sh", "", False, id="accepted although wrong on purpose"),
    ],
)
def test_only_inputs_that_are_wrong_on_purpose_may_be_rejected(name: str, error: str, *, is_expected: bool) -> None:
    result = ParserResult(ParserCall(name, "swift-4", []), "ms-swift 4.6.0", error)

    assert result.is_expected is is_expected
    assert ("**unexpected**" in result.render()) is not is_expected
