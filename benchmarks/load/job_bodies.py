"""Builds the FineTuneJobs of the load benchmarks, and the pods as a kubelet reports them after the trainer exited."""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.rig import NAMESPACE
from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.api_paths import collection_path, extend_path

RawBody = dict[str, Any]
JOBS_PATH = collection_path(names.FINETUNEJOB_KIND, NAMESPACE)
PODS_PATH = collection_path("Pod", NAMESPACE)
FAKE_POD_FIELDS = {"nodeSelector": {"type": "kwok"}, "tolerations": [{"operator": "Exists"}]}

KILLED_RANK_TERMINATION = {
    "final": True,
    "outcome": "failed",
    "rank": 0,
    "errorType": "RankKilled",
    "signal": 9,
    "message": "rank 0 was killed",
}


def build_job_body(name: str, nodes: int) -> RawBody:
    """Return the body of a job whose pods run on kwok nodes."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.FINETUNEJOB_KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "model": {"name": "/output/model"},
            "dataset": {"train": [{"name": "/output/train.jsonl"}], "numWorkers": 0},
            "sft": {},
            "numNodes": nodes,
            "output": {"persistentVolumeClaim": {"claimName": "models"}},
            "podTemplate": FAKE_POD_FIELDS,
        },
    }


async def report_killed_rank(api: ApiClient, pod: RawBody) -> None:
    """Replace the status of the pod as a kubelet does after a rank was killed."""
    await api.call("PUT", extend_path(PODS_PATH, pod["metadata"]["name"], "status"), body=build_killed_pod(pod))


def build_killed_pod(pod: RawBody) -> RawBody:
    """Return the pod, for an unconditional update, with the status that a kubelet reports after a rank was killed."""
    message = json.dumps({**KILLED_RANK_TERMINATION, "time": time.time()})
    metadata = {key: value for key, value in pod["metadata"].items() if key != "resourceVersion"}
    return build_terminated_pod({**pod, "metadata": metadata}, exit_code=1, reason="Error", message=message)


def build_terminated_pod(pod: RawBody, *, exit_code: int, reason: str, message: str) -> RawBody:
    """Return the pod with the status that a kubelet reports after the trainer has exited."""
    reported_status = (pod["status"].get("containerStatuses") or [{}])[0]
    container = {
        "image": "none",
        "imageID": "",
        "restartCount": 0,
        **reported_status,
        "name": pod["spec"]["containers"][0]["name"],
        "ready": False,
        "started": False,
        "state": {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}},
    }
    phase = "Failed" if exit_code else "Succeeded"
    return {**pod, "status": {**pod["status"], "phase": phase, "containerStatuses": [container]}}
