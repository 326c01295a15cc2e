"""What the words of an error say, on the texts that the patterns were written for; the rest is for the benchmark."""

import pytest

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.error_patterns import PATTERNS, recognise
from finetune_operator.failures.rules import judge_node
from testing.corpus.error_corpus import Labelled, read_corpus

KNOWN = read_corpus(held_out=False)


@pytest.mark.parametrize("entry", KNOWN, ids=lambda entry: f"{entry.reason}-{entry.source}")
def test_real_texts_are_told_apart(entry: Labelled) -> None:
    assert (recognise(entry.said) or Reason.USER_CODE_ERROR) is entry.reason


def test_every_pattern_has_texts() -> None:
    patterned = {pattern.reason for pattern in PATTERNS}

    assert patterned <= {entry.reason for entry in KNOWN}
    assert len(patterned) == len(PATTERNS)


def test_an_error_of_the_users_own_stays_his() -> None:
    said = Evidence(node_rank=0, ended=True, exit_code=1, outcome="failed", error_type="KeyError", message="'messages'")

    assert judge_node(said).reason is Reason.USER_CODE_ERROR


def test_the_typed_error_of_the_trainer_speaks_before_its_words() -> None:
    said = Evidence(
        node_rank=0, ended=True, exit_code=2, outcome="failed", error_type="DatasetError", message="connection refused"
    )

    assert judge_node(said).reason is Reason.DATASET_ERROR


def test_a_connection_that_was_lost_makes_a_victim() -> None:
    said = Evidence(
        node_rank=0, ended=True, exit_code=1, outcome="failed", error_type="RuntimeError", message="Broken pipe"
    )

    verdict = judge_node(said)
    assert (verdict.reason, verdict.victim, verdict.action) == (Reason.PEER_LOST, True, FailureAction.RESTART)


def test_what_was_stopped_is_not_judged_by_its_words() -> None:
    said = Evidence(node_rank=0, ended=True, exit_code=143, outcome="stopped", message="Broken pipe")

    assert judge_node(said).reason is Reason.STOPPED


@pytest.mark.parametrize(
    ("full", "reason"), [("/dev/shm", Reason.SHARED_MEMORY_EXHAUSTED), ("/output", Reason.DISK_FULL)]
)
def test_the_volume_that_the_supervisor_found_full_decides(full: str, reason: Reason) -> None:
    assert recognise(f"OSError: [Errno 28] No space left on device (full: {full})") is reason
