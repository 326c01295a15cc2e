"""Tests of heartbeat files and of the endpoints /status and /metrics."""

import json
import time
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import Heartbeat, read_heartbeats, write_heartbeat
from finetune_supervisor.messages import Degradation, PeakMemory, TrainingProgress
from finetune_supervisor.status.http_server import NodeSnapshot, render_metrics, render_status, start_status_server
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from testing.builders.nodes import node

HEARTBEAT = Heartbeat(
    rank=2,
    local_rank=0,
    pid=7,
    time=100.0,
    phase=contract.TRAIN,
    first_step=10,
    first_step_time=90.0,
    peak_memory_bytes=5,
    own_step_seconds=0.5,
    progress=TrainingProgress(
        step=12, total_steps=40, loss=1.5, last_checkpoint="step-00000010", memory=PeakMemory(forecast=9)
    ),
)


def test_written_heartbeat_is_read_back(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, HEARTBEAT)

    assert read_heartbeats(tmp_path) == (HEARTBEAT,)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 1}', '{"progress": {}, "unknown": 1}'])
def test_invalid_heartbeat_file_is_skipped(tmp_path: Path, text: str) -> None:
    write_heartbeat(tmp_path, HEARTBEAT)
    (tmp_path / "rank-1.json").write_text(text)

    assert read_heartbeats(tmp_path) == (HEARTBEAT,)


def test_heartbeats_are_throttled_except_for_phase_changes(tmp_path: Path) -> None:
    reporter = HeartbeatWriter(tmp_path, rank=2, local_rank=0)
    reporter.record_progress(replace(reporter.progress, model_revision="5eed"))
    reporter.start_training(10, total_steps=40, checkpoint="step-00000010")
    for step in range(11, 20):
        reporter.update_progress(replace(reporter.progress, step=step))
    (before,) = read_heartbeats(tmp_path)
    reporter.enter_phase(contract.DONE)
    (after,) = read_heartbeats(tmp_path)

    assert (before.phase, before.progress.step, before.first_step) == (contract.INIT, 10, 10)
    assert before.progress.model_revision == after.progress.model_revision == "5eed"
    assert before.first_step_time is None
    assert after.first_step_time is not None
    assert after.first_step_time <= after.time
    assert (after.phase, after.progress.step, after.progress.last_checkpoint) == (contract.DONE, 19, "step-00000010")
    assert after.peak_memory_bytes is not None
    assert after.peak_memory_bytes > 1_000_000


def test_status_contains_phase_progress_and_ranks(tmp_path: Path) -> None:
    status = render_status(node(tmp_path), NodeSnapshot(contract.TRAIN, contract.RUNNING, (HEARTBEAT,)), now=103.5)

    assert status["progress"] == {
        "step": 12,
        "totalSteps": 40,
        "loss": 1.5,
        "lastCheckpoint": "step-00000010",
        "firstStep": 10,
        "firstStepTime": "1970-01-01T00:01:30.000Z",
        "memory": {"forecast": 9, "peakHighest": 0, "peakHighestRank": 0, "peakLowest": 0, "peakLowestRank": 0},
        "updateTime": "1970-01-01T00:01:40.000Z",
    }
    assert (status["phase"], status["outcome"], status["worldSize"], status["firstStep"]) == ("train", "running", 4, 10)
    assert status["ranks"] == [
        {
            "rank": 2,
            "localRank": 0,
            "pid": 7,
            "phase": "train",
            "step": 12,
            "heartbeatAgeSeconds": 3.5,
            "peakMemoryBytes": 5,
            "ownStepSeconds": 0.5,
        }
    ]


def test_status_and_metrics_contain_degradations(tmp_path: Path) -> None:
    snapshot = NodeSnapshot(contract.TRAIN, contract.RUNNING, (), (Degradation("IdleGpus", "2 of 4 GPUs are idle"),))

    status = render_status(node(tmp_path), snapshot, now=1.0)
    metrics = render_metrics(node(tmp_path), snapshot, now=1.0)

    assert status["degraded"] == [{"reason": "IdleGpus", "message": "2 of 4 GPUs are idle"}]
    (family,) = text_string_to_metric_families(metrics)
    assert (family.name, family.samples[0].labels["reason"], family.samples[0].value) == (
        "finetune_degraded",
        "IdleGpus",
        1,
    )


def test_heartbeat_file_contains_degradations(tmp_path: Path) -> None:
    degraded = (Degradation("IdleGpus", "2 of 4 GPUs are idle"),)

    write_heartbeat(tmp_path, replace(HEARTBEAT, degraded=degraded))

    assert [heartbeat.degraded for heartbeat in read_heartbeats(tmp_path)] == [degraded]


def test_metrics_are_valid_prometheus_text(tmp_path: Path) -> None:
    snapshot = NodeSnapshot(contract.TRAIN, contract.RUNNING, (HEARTBEAT,))

    families = {
        family.name: family.samples
        for family in text_string_to_metric_families(render_metrics(node(tmp_path), snapshot, now=103.5))
    }

    (step,) = families["finetune_step"]
    assert step.value == 12
    assert step.labels == {"namespace": "default", "job": "bert", "attempt": "1", "node_rank": "0"}
    (age,) = families["finetune_rank_heartbeat_age_seconds"]
    assert (age.value, age.labels["rank"]) == (3.5, "2")
    assert "finetune_eval_loss" not in families
    (forecast,), (own,) = families["finetune_memory_forecast_bytes"], families["finetune_rank_own_step_seconds"]
    assert (forecast.value, own.value, own.labels["rank"]) == (9, 0.5, "2")


def test_only_node_rank_zero_exports_progress(tmp_path: Path) -> None:
    snapshot = NodeSnapshot(contract.TRAIN, contract.RUNNING, (HEARTBEAT,))

    assert "finetune_step{" not in render_metrics(node(tmp_path, node_rank=1), snapshot, now=101)


def test_server_responds_only_to_get_requests_for_known_paths(tmp_path: Path) -> None:
    server = start_status_server(node(tmp_path), lambda: NodeSnapshot(contract.TRAIN, contract.RUNNING, (HEARTBEAT,)))

    def send_request(method: str, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=5)
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()

    try:
        code, body = send_request("GET", "/status")
        assert code == 200
        assert json.loads(body)["ranks"][0]["heartbeatAgeSeconds"] == pytest.approx(time.time() - HEARTBEAT.time, abs=5)
        assert send_request("GET", "/metrics")[0] == 200
        assert send_request("GET", "/elsewhere")[0] == 404
        assert send_request("POST", "/status")[0] == 404
    finally:
        server.shutdown()
        server.server_close()
