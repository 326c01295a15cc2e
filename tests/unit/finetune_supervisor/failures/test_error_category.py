"""Tests that secrets in an error message do not change the verdict."""

import json
from pathlib import Path

import pytest

from finetune_api.termination import parse_termination
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.error_patterns import PATTERNS, classify_error_text
from finetune_operator.failures.rules import judge_node
from finetune_operator.observation.read_evidence import read_evidence
from finetune_supervisor.error_text import find_category
from finetune_supervisor.launch.child_process import ProcessOutput
from finetune_supervisor.messages import TerminationMessage
from finetune_supervisor.status.node_reporter import NodeReporter
from testing.builders.nodes import node

ERRORS = (
    ("RuntimeError", "CUDA out of memory. Tried to allocate 2 GiB"),
    ("OSError", "[Errno 116] Stale file handle: '/output/a'"),
    ("RuntimeError", "NCCL error: unhandled system error"),
    ("UnpicklingError", "Weights only load failed"),
    ("ConnectionError", "HTTPSConnectionPool(host='huggingface.co'): Max retries exceeded"),
    ("StorageFault", "Input/output error"),
    ("DatasetError", "/data/rows.jsonl line 4: expected one JSON object"),
    ("ValueError", "an error that no pattern matches"),
)


def report(tmp_path: Path, error_type: str, message: str) -> Evidence:
    """Return the evidence of a node that failed with this error."""
    this_node = node(tmp_path)
    NodeReporter(this_node, ProcessOutput(None)).write_final_message(
        TerminationMessage(final=True, outcome="failed", error_type=error_type, message=message)
    )
    termination = parse_termination(this_node.termination_log.read_text())
    assert termination is not None
    pod = {"metadata": {"name": "bert-0-0"}, "status": {"phase": "Failed"}}
    return read_evidence(pod, {"exitCode": 1}, termination, node_rank=0, is_tombstone=False)


@pytest.mark.parametrize(("error_type", "message"), ERRORS)
@pytest.mark.parametrize("beyond_bound", [False, True])
def test_secrets_do_not_change_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_type: str, message: str, *, beyond_bound: bool
) -> None:
    expected = judge_node(report(tmp_path, error_type, message)).reason
    monkeypatch.setenv("MY_PASSWORD", message)
    monkeypatch.setenv("OTHER_TOKEN", error_type)
    if beyond_bound:
        (tmp_path / "secret").write_bytes(b"x" * (2**20 + 1))
        volume = {"mountPath": str(tmp_path / "secret"), "secret": {"secretName": "s"}}
        (tmp_path / "job.json").write_text(json.dumps({"volumes": [volume]}))
        monkeypatch.setenv("FINETUNE_CONFIG", str(tmp_path / "job.json"))

    evidence = report(tmp_path, error_type, message)

    assert message not in evidence.message
    assert judge_node(evidence).reason is expected
    assert ("rows.jsonl line 4" in judge_node(evidence).message) == ("rows.jsonl line 4" in message)


def test_the_supervisor_classifies_as_the_operator() -> None:
    for error_type, message in ERRORS:
        assert (find_category(error_type, message) or None) == classify_error_text(f"{error_type}: {message}")


def test_a_category_that_no_pattern_has_is_ignored() -> None:
    evidence = Evidence(
        node_rank=0, outcome="failed", error_type="ValueError", message="x", category="Complete", ended=True
    )

    assert judge_node(evidence).reason is Reason.USER_CODE_ERROR
    assert PATTERNS
