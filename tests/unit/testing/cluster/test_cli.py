"""Tests of the command line of the throwaway cluster."""

import argparse

import pytest

from testing.cluster.cli import CHAOS_VERBS, SETUP_VERBS, build_parser, main


def test_every_verb_has_a_handler() -> None:
    (verbs,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))

    assert {*verbs.choices} == {*SETUP_VERBS, *CHAOS_VERBS}
    assert len(verbs.choices) > 15


def test_error_for_invalid_cluster_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "Not-A-Name", "up"]) == 1

    error = capsys.readouterr().err
    assert error.startswith("cluster: cluster name 'Not-A-Name'")
    assert error.count("\n") == 1


def test_verb_fails_on_stopped_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))

    assert main(["stop-kubelet", "node1"]) == 1

    assert "run `up` first" in capsys.readouterr().err
