"""Tests of the error patterns on the training set of the corpus; the benchmark uses the held-out set."""

import pytest

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.error_patterns import PATTERNS, classify_error_text
from finetune_operator.failures.rules import judge_node
from testing.corpus.error_corpus import LabelledError, read_corpus

TRAINING_SET = read_corpus(held_out=False)


@pytest.mark.parametrize("entry", TRAINING_SET, ids=lambda entry: f"{entry.reason}-{entry.source}")
def test_error_messages_of_the_corpus_are_classified(entry: LabelledError) -> None:
    assert (classify_error_text(entry.message) or Reason.USER_CODE_ERROR) is entry.reason


def test_corpus_contains_messages_for_every_pattern() -> None:
    assert PATTERNS.keys() <= {entry.reason for entry in TRAINING_SET}


def test_error_type_of_the_trainer_takes_precedence_over_the_patterns() -> None:
    evidence = Evidence(
        node_rank=0, ended=True, exit_code=2, outcome="failed", error_type="DatasetError", message="connection refused"
    )

    assert judge_node(evidence).reason is Reason.DATASET_ERROR


def test_a_lost_connection_makes_a_node_a_victim() -> None:
    evidence = Evidence(
        node_rank=0, ended=True, exit_code=1, outcome="failed", error_type="RuntimeError", message="Broken pipe"
    )

    verdict = judge_node(evidence)
    assert (verdict.reason, verdict.victim, verdict.action) == (Reason.PEER_LOST, True, FailureAction.RESTART)


def test_error_message_of_a_stopped_node_is_ignored() -> None:
    evidence = Evidence(node_rank=0, ended=True, exit_code=143, outcome="stopped", message="Broken pipe")

    assert judge_node(evidence).reason is Reason.STOPPED


@pytest.mark.parametrize(
    ("path", "reason"), [("/dev/shm", Reason.SHARED_MEMORY_EXHAUSTED), ("/output", Reason.DISK_FULL)]
)
def test_path_of_the_full_volume_determines_the_reason(path: str, reason: Reason) -> None:
    assert classify_error_text(f"OSError: [Errno 28] No space left on device (full: {path})") is reason


@pytest.mark.parametrize(("path", "reason"), [("/output/jobs/a/saved.tmp", Reason.STORAGE_FAULT), ("/data/a", None)])
def test_read_only_file_system_is_a_storage_fault_only_for_the_output(path: str, reason: Reason | None) -> None:
    assert classify_error_text(f"OSError: [Errno 30] Read-only file system: '{path}'") is reason
