"""Builders of run plans and pod manifests, and a spec with all fields set."""

from typing import Any

from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.object_metadata import Manifest
from finetune_operator.plan.run_plan import RunPlan, plan_run
from finetune_operator.settings import Settings
from testing.builders.jobs import SETTINGS, job

NOT_READY = "node.kubernetes.io/not-ready"


ALL_FIELDS: dict[str, Any] = {
    "numNodes": 1,
    "nprocPerNode": None,
    "image": "registry.example/mine:2",
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}, {"name": "mirror"}],
    "resources": {
        "limits": {"cpu": "9", "memory": "16Gi", "nvidia.com/gpu": 4},
        "requests": {"cpu": "8500m", "memory": "12Gi"},
    },
    "env": [
        {"name": "HF_HOME", "value": "/models/hub"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ],
    "volumes": [
        {"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "datasets"}, "readOnly": True},
        {"name": "models", "mountPath": "/models", "subPath": "team/a", "nfs": {"server": "nfs.example", "path": "/m"}},
        {"name": "templates", "mountPath": "/templates", "configMap": {"name": "chat-templates", "optional": True}},
        {"name": "keys", "mountPath": "/keys", "secret": {"secretName": "hub", "defaultMode": 288}, "readOnly": True},
        {"name": "scratch", "mountPath": "/scratch", "emptyDir": {}},
        {
            "name": "base",
            "mountPath": "/base",
            "image": {"reference": "registry.example/qwen:1", "pullPolicy": "Always"},
        },
        {"name": "disk", "mountPath": "/disk", "hostPath": {"path": "/mnt/nvme", "type": "Directory"}},
    ],
    "output": {"persistentVolumeClaim": {"claimName": "models"}, "subPath": "team/bert"},
    "network": {
        "masterPort": 29400,
        "interface": "ib0",
        "nccl": {"debug": "INFO", "ibDisable": False, "p2pDisable": True, "ibHca": "mlx5_0", "ibGidIndex": 3},
    },
    "podTemplate": {
        "labels": {"team": "a", "app.kubernetes.io/managed-by": "helm"},
        "annotations": {"example.com/why": "because"},
        "nodeSelector": {"gpu": "h100"},
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "tolerations": [
            {"key": "gpu", "operator": "Equal", "value": "h100", "effect": "NoSchedule"},
            {"key": NOT_READY, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5},
        ],
        "priorityClassName": "urgent",
        "schedulerName": "bin-packer",
        "runtimeClassName": "nvidia",
        "serviceAccountName": "trainer",
        "securityContext": {"runAsUser": 4000, "fsGroup": 4000},
        "containerSecurityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    },
}


def build_run_plan(*, attempt: int = 0, settings: Settings = SETTINGS, **fields: Any) -> RunPlan:
    """Return the run plan of a job with these spec fields."""
    return plan_run(job(**fields), attempt=attempt, settings=settings)


def build_pod_manifests(run_plan: RunPlan) -> list[Manifest]:
    """Return the pod manifests of an attempt."""
    pods = [child for child in build_children(run_plan) if child["kind"] == "Pod"]
    assert len(pods) == run_plan.spec.num_nodes
    return pods


def build_first_pod_manifest(**fields: Any) -> Manifest:
    """Return the pod manifest of node 0."""
    return build_pod_manifests(build_run_plan(**fields))[0]


def build_trainer_container(**fields: Any) -> Manifest:
    """Return the trainer container in the pod manifest of node 0."""
    trainer: Manifest = build_first_pod_manifest(**fields)["spec"]["containers"][0]
    return trainer
