"""The list of errors by which supervisor and operator recognise victims."""

import time

import pytest

from finetune_api.v1alpha1.reasons import Reason
from finetune_operator.failures.error_patterns import classify_error_text
from finetune_supervisor.peer_loss import is_victim
from testing.corpus.error_corpus import LabelledError, read_corpus

PEER_LOSSES = [entry for entry in read_corpus(held_out=False) if entry.reason is Reason.PEER_LOST]


@pytest.mark.parametrize("entry", PEER_LOSSES, ids=lambda entry: entry.source)
def test_a_rank_that_lost_its_peers_is_a_victim(entry: LabelledError) -> None:
    assert is_victim("RuntimeError", entry.text)


@pytest.mark.parametrize("error_type", ["DistBackendError", "TimeoutError", "ConnectionResetError", "SignalException"])
def test_the_type_of_an_error_suffices(error_type: str) -> None:
    assert is_victim(error_type, "")


@pytest.mark.parametrize(
    ("text", "victim"),
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
def test_only_a_text_about_peers_makes_a_victim(text: str, victim: bool) -> None:
    assert is_victim("RuntimeError", text) is victim


def test_the_operator_recognises_the_same_texts() -> None:
    assert classify_error_text("RuntimeError: Read error [10.0.0.7]:4321: Connection timed out") is Reason.PEER_LOST


def test_an_unspecific_cause_reported_by_the_watchdog_is_a_lost_peer_only_for_the_operator() -> None:
    text = "NCCL watchdog thread terminated with exception: stop"

    assert classify_error_text(text) is Reason.PEER_LOST
    assert not is_victim("RuntimeError", text)


@pytest.mark.parametrize("part", ["gloo", "gloo timed ", "connection ", "read error ", "NCCL "])
def test_long_texts_are_searched_in_linear_time(part: str) -> None:
    started_at = time.process_time()

    is_victim("RuntimeError", part * (200_000 // len(part)))

    assert time.process_time() - started_at < 5
