"""The verbs of `python -m testing.cluster`."""

import argparse

import pytest

from testing.cluster.cli import CHAOS_VERBS, SETUP_VERBS, main, parser


def test_every_verb_that_can_be_said_can_be_done() -> None:
    (verbs,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))

    assert {*verbs.choices} == {*SETUP_VERBS, *CHAOS_VERBS}
    assert len(verbs.choices) > 15


def test_a_name_that_cannot_be_is_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "Not-A-Name", "up"]) == 1

    said = capsys.readouterr().err
    assert said.startswith("cluster: cluster name 'Not-A-Name'")
    assert said.count("\n") == 1


def test_a_cluster_that_is_not_up_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))

    assert main(["stop-kubelet", "node1"]) == 1

    assert "run `up` first" in capsys.readouterr().err
