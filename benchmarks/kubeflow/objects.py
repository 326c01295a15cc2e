"""Builds the TrainJobs and TrainingRuntimes of the benchmarks."""

from __future__ import annotations

from typing import Any

JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
RESTART_ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
NODE_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
MAX_RESTARTS = 3

RawBody = dict[str, Any]


def build_train_job(name: str, *, runtime: str, nodes: int, processes_per_node: int = 1) -> RawBody:
    """Return a TrainJob that runs the training runtime on this number of nodes."""
    trainer = {"numNodes": nodes, "numProcPerNode": processes_per_node}
    return build_object(
        "TrainJob", name, {"runtimeRef": {"name": runtime, "kind": "TrainingRuntime"}, "trainer": trainer}
    )


def build_training_runtime(name: str, pod_spec: RawBody) -> RawBody:
    """Return a TrainingRuntime whose nodes are pods with this spec.

    If a pod fails, all pods are replaced, at most MAX_RESTARTS times: without `backoffLimit: 0` and the failure policy,
    only the failed pod would be replaced.
    """
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", **pod_spec}}},
        },
    }
    spec = {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {"spec": {"failurePolicy": {"maxRestarts": MAX_RESTARTS}, "replicatedJobs": [node]}},
    }
    return build_object("TrainingRuntime", name, spec)


def build_object(kind: str, name: str, spec: RawBody) -> RawBody:
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
