"""Tests that the floor of `make bench` sends the requests that a job needs."""

import json

from benchmarks.load.floor_requests import render_attempts, render_status_write
from benchmarks.load.job_bodies import build_job_body
from benchmarks.rig import NAMESPACE
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator.core.actions import Create
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import UID, decide_once

NODES = 3


def test_floor_creates_the_objects_that_the_operator_creates() -> None:
    metadata = {"name": "bert", "namespace": NAMESPACE, "uid": UID, "generation": 1, "resourceVersion": "1"}
    job = FineTuneJob.parse({**build_job_body("bert", NODES), "metadata": metadata})
    observation = Observation(nodes=(), service_exists=False, is_fresh=True)
    job, _ = decide_once(job, observation)
    _, decision = decide_once(job, observation)

    first, second = render_attempts("bert", nodes=NODES)
    created = [json.loads(create.content) for create in (*first.objects, *first.pods)]
    assert created == [action.manifest for action in decision.actions if isinstance(action, Create)]
    assert [create.kind for create in (*second.objects, *second.pods)] == ["ConfigMap", *["Pod"] * NODES]
    assert {json.loads(create.content)["metadata"]["name"] for create in second.pods} == {
        f"bert-1-{rank}" for rank in range(NODES)
    }


def test_floor_writes_the_statuses_of_a_restart() -> None:
    first, second = render_attempts("bert", nodes=NODES)

    statuses = (first.starting, first.running, first.stopping, second.starting, second.running)
    states = [[attempt["state"] for attempt in json.loads(status)["attempts"]] for status in statuses]
    assert states == [["Starting"], ["Running"], ["Stopping"], ["Failed", "Starting"], ["Failed", "Running"]]
    metadata = {"name": "bert", "namespace": NAMESPACE, "uid": "a", "resourceVersion": "7", "managedFields": []}
    written = json.loads(render_status_write({**build_job_body("bert", NODES), "metadata": metadata}, first.running))
    assert written["status"] == json.loads(first.running)
    assert "managedFields" not in written["metadata"]
