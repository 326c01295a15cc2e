"""Tests of the error patterns that identify victims of a peer loss."""

import time

import pytest

from finetune_api.v1alpha1.reasons import Reason
from finetune_operator.failures.error_patterns import classify_error_text
from finetune_supervisor.peer_loss import is_victim
from testing.corpus.error_corpus import LabelledError, read_corpus

PEER_LOSSES = [error for error in read_corpus(held_out=False) if error.reason is Reason.PEER_LOST]


@pytest.mark.parametrize("peer_loss_error", PEER_LOSSES, ids=lambda error: error.source)
def test_rank_that_lost_its_peers_is_a_victim(peer_loss_error: LabelledError) -> None:
    assert is_victim("RuntimeError", peer_loss_error.text)


@pytest.mark.parametrize("error_type", ["DistBackendError", "TimeoutError", "ConnectionResetError", "SignalException"])
def test_error_type_alone_identifies_a_victim(error_type: str) -> None:
    assert is_victim(error_type, "")


@pytest.mark.parametrize(
    ("message", "is_expected_victim"),
    [
        ("[../gloo/transport/tcp/pair.cc:547] Read error [10.0.0.7]:4321: Connection timed out", True),
        ("image file is truncated: read error at byte 12", False),
        ("[Rank 1] Collective operation timeout: WorkNCCL(SeqNum=7)", True),
        ("gloo connectFullMesh failed: timed out connecting to 10.0.0.7", True),
        ("TCPStore(): incompatible constructor arguments", False),
        ("NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered", False),
        ("[Errno -2] Name or service not known", False),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
    ],
)
def test_only_messages_about_a_lost_peer_identify_a_victim(message: str, is_expected_victim: bool) -> None:
    assert is_victim("RuntimeError", message) is is_expected_victim


def test_operator_classifies_the_same_messages_as_peer_loss() -> None:
    assert classify_error_text("RuntimeError: Read error [10.0.0.7]:4321: Connection timed out") is Reason.PEER_LOST


def test_generic_watchdog_error_is_a_peer_loss_only_for_the_operator() -> None:
    message = "NCCL watchdog thread terminated with exception: stop"

    assert classify_error_text(message) is Reason.PEER_LOST
    assert not is_victim("RuntimeError", message)


@pytest.mark.parametrize("repeated_text", ["gloo", "gloo timed ", "connection ", "read error ", "NCCL "])
def test_long_messages_are_searched_in_linear_time(repeated_text: str) -> None:
    started_at = time.process_time()

    is_victim("RuntimeError", repeated_text * (200_000 // len(repeated_text)))

    assert time.process_time() - started_at < 5
