import json
import time
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import Heartbeat, Memory, Progress, read_heartbeats, write_heartbeat
from finetune_supervisor.status.http_server import Snapshot, render_metrics, render_status, serve
from finetune_trainer.distributed.heartbeat_writer import Reporter
from testing.builders.nodes import node

BEAT = Heartbeat(
    rank=2,
    local_rank=0,
    pid=7,
    time=100.0,
    phase=contract.TRAIN,
    first_step=10,
    first_step_time=90.0,
    peak_memory_bytes=5,
    own_step_seconds=0.5,
    progress=Progress(step=12, total_steps=40, loss=1.5, last_checkpoint="step-00000010", memory=Memory(forecast=9)),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, BEAT)

    assert read_heartbeats(tmp_path) == (BEAT,)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 1}', '{"progress": {}, "unknown": 1}'])
def test_a_file_that_is_none_counts_as_no_heartbeat(tmp_path: Path, text: str) -> None:
    write_heartbeat(tmp_path, BEAT)
    (tmp_path / "rank-1.json").write_text(text)

    assert read_heartbeats(tmp_path) == (BEAT,)


def test_a_rank_reports_at_most_twice_a_second_but_every_phase(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, rank=2, local_rank=0)
    reporter.start_at(10, of=40, checkpoint="step-00000010")
    for step in range(11, 20):
        reporter.report(replace(reporter.progress, step=step))
    (before,) = read_heartbeats(tmp_path)
    reporter.enter(contract.DONE)
    (after,) = read_heartbeats(tmp_path)

    assert (before.phase, before.progress.step, before.first_step) == (contract.INIT, 10, 10)
    assert before.first_step_time is None
    assert after.first_step_time is not None
    assert after.first_step_time <= after.time
    assert (after.phase, after.progress.step, after.progress.last_checkpoint) == (contract.DONE, 19, "step-00000010")
    assert after.peak_memory_bytes is not None
    assert after.peak_memory_bytes > 1_000_000


def test_the_status_tells_phase_progress_and_ranks(tmp_path: Path) -> None:
    told = render_status(node(tmp_path), Snapshot(contract.TRAIN, contract.RUNNING, (BEAT,)), now=103.5)

    assert told["progress"] == {
        "step": 12,
        "totalSteps": 40,
        "loss": 1.5,
        "lastCheckpoint": "step-00000010",
        "firstStep": 10,
        "firstStepTime": "1970-01-01T00:01:30.000Z",
        "memory": {"forecast": 9, "peakHighest": 0, "peakHighestRank": 0, "peakLowest": 0, "peakLowestRank": 0},
        "updateTime": "1970-01-01T00:01:40.000Z",
    }
    assert (told["phase"], told["outcome"], told["worldSize"], told["firstStep"]) == ("train", "running", 4, 10)
    assert told["ranks"] == [
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


def test_metrics_are_what_prometheus_reads(tmp_path: Path) -> None:
    seen = Snapshot(contract.TRAIN, contract.RUNNING, (BEAT,))

    families = {
        family.name: family.samples
        for family in text_string_to_metric_families(render_metrics(node(tmp_path), seen, now=103.5))
    }

    (step,) = families["finetune_step"]
    assert step.value == 12
    assert step.labels == {"namespace": "default", "job": "bert", "attempt": "1", "node_rank": "0"}
    (age,) = families["finetune_rank_heartbeat_age_seconds"]
    assert (age.value, age.labels["rank"]) == (3.5, "2")
    assert "finetune_eval_loss" not in families
    (forecast,), (own,) = families["finetune_memory_forecast_bytes"], families["finetune_rank_own_step_seconds"]
    assert (forecast.value, own.value, own.labels["rank"]) == (9, 0.5, "2")


def test_progress_is_measured_by_node_rank_zero_alone(tmp_path: Path) -> None:
    seen = Snapshot(contract.TRAIN, contract.RUNNING, (BEAT,))

    assert "finetune_step{" not in render_metrics(node(tmp_path, node_rank=1), seen, now=101)


def test_the_server_answers_get_and_knows_two_paths(tmp_path: Path) -> None:
    server = serve(node(tmp_path), lambda: Snapshot(contract.TRAIN, contract.RUNNING, (BEAT,)))

    def ask(method: str, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=5)
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()

    try:
        code, body = ask("GET", "/status")
        assert code == 200
        assert json.loads(body)["ranks"][0]["heartbeatAgeSeconds"] == pytest.approx(time.time() - BEAT.time, abs=5)
        assert ask("GET", "/metrics")[0] == 200
        assert ask("GET", "/elsewhere")[0] == 404
        assert ask("POST", "/status")[0] == 404
    finally:
        server.shutdown()
        server.server_close()
