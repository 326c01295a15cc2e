"""Tests of the command line of the throwaway cluster."""

import argparse

import pytest

from testing.cluster.cli import CHAOS_COMMANDS, SETUP_COMMANDS, build_parser, main


def test_every_command_has_a_handler() -> None:
    (subparsers,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))

    assert {*subparsers.choices} == {*SETUP_COMMANDS, *CHAOS_COMMANDS}
    assert len(subparsers.choices) > 15


def test_error_for_invalid_cluster_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "Not-A-Name", "up"]) == 1

    error = capsys.readouterr().err
    assert error.startswith("cluster: cluster name 'Not-A-Name'")
    assert error.count("\n") == 1


def test_cluster_command_fails_if_the_cluster_is_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))

    assert main(["stop-kubelet", "node1"]) == 1

    assert "run `up` first" in capsys.readouterr().err
