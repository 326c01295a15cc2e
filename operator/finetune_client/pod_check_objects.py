"""Builds the objects of a check of pods: a headless Service, and pods like those of a job without devices and data."""

import inspect
import secrets
from dataclasses import replace

from finetune_api.v1alpha1.job import GROUP, FineTuneJob
from finetune_client import pod_probe
from finetune_operator import names
from finetune_operator.observation.ownership import RawBody
from finetune_operator.plan.pod_manifest import build_pod
from finetune_operator.plan.pod_placement import SOFT_SPREAD
from finetune_operator.plan.run_plan import RunPlan, plan_run
from finetune_operator.settings import Settings

CHECK_LABEL = names.JOB_NAME  # the NetworkPolicy of the chart applies to pods with this label
COMPONENT = {"app.kubernetes.io/component": "pod-check"}
LIFETIME_SECONDS = 1800  # an abandoned pod ends by itself
MAX_PODS = 2
RESOURCES = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


def build_check_objects(job: FineTuneJob, *, image: str, suffix: str) -> tuple[RawBody, ...]:
    """Return the Service and one pod, or two if the job has several nodes."""
    name = f"{job.metadata.name[:45]}-check-{suffix}"  # pod names have at most 63 characters
    # these pods belong to no group, so that they start at once
    run_plan = replace(plan_run(job, attempt=0, settings=Settings(trainer_image=image)), scheduling=None)
    arbitrary_port = 30_000 + secrets.randbelow(30_000)  # NCCL and gloo use such ports
    ports = (run_plan.spec.network.master_port, arbitrary_port)
    token = secrets.token_hex(16)
    hosts = [f"{name}-{index}" for index in range(min(len(run_plan.nodes), MAX_PODS))]
    peers = [f"{host}.{name}.{run_plan.namespace}.svc" for host in reversed(hosts)] if len(hosts) > 1 else [""]
    return (
        _build_service(name, ports),
        *(
            _build_pod(run_plan, check=name, host=host, arguments=(peer, ",".join(map(str, ports)), token))
            for host, peer in zip(hosts, peers, strict=True)
        ),
    )


def _build_service(name: str, ports: tuple[int, ...]) -> RawBody:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {CHECK_LABEL: name, **COMPONENT}},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {CHECK_LABEL: name},
            "ports": [{"name": f"port-{port}", "port": port} for port in ports],
        },
    }


def _build_pod(run_plan: RunPlan, *, check: str, host: str, arguments: tuple[str, ...]) -> RawBody:
    """Return a pod of the job with the probe instead of the trainer, without gates, devices, volumes and variables."""
    pod = build_pod(run_plan, run_plan.nodes[0])
    (trainer,) = pod["spec"]["containers"]
    kept = {key: trainer[key] for key in ("name", "image", "imagePullPolicy", "securityContext") if key in trainer}
    command = ["python3", "-c", inspect.getsource(pod_probe), *arguments]
    job_pod = {key: value for key, value in pod["spec"].items() if key not in ("schedulingGates", "resourceClaims")}
    labels = {**_drop_managed_keys(pod["metadata"]["labels"]), CHECK_LABEL: check, **COMPONENT}
    annotations = _drop_managed_keys(pod["metadata"].get("annotations") or {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": host, "labels": labels, "annotations": annotations},
        "spec": {
            **job_pod,
            "hostname": host,
            "subdomain": check,
            "activeDeadlineSeconds": LIFETIME_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "topologySpreadConstraints": [{**SOFT_SPREAD, "labelSelector": {"matchLabels": {CHECK_LABEL: check}}}],
            "containers": [{**kept, "command": command, "resources": RESOURCES}],
            "volumes": [],
        },
    }


def _drop_managed_keys(values: dict[str, str]) -> dict[str, str]:
    """Drop labels or annotations with which the operator or Kueue would treat the pod as one of the job."""
    prefixes = (f"{GROUP}/", names.KUEUE_PREFIX, names.MANAGED_BY)
    return {key: value for key, value in values.items() if not key.startswith(prefixes)}
