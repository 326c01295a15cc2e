"""Builds the manifests of one attempt from its run plan; plan.pod_manifest builds the pods."""

from finetune_operator import names
from finetune_operator.plan.config_map import build_config_map
from finetune_operator.plan.object_metadata import Manifest, build_metadata
from finetune_operator.plan.pod_group import build_pod_group
from finetune_operator.plan.pod_manifest import build_pods
from finetune_operator.plan.run_plan import RunPlan


def build_children(run_plan: RunPlan) -> tuple[Manifest, ...]:
    """Return the manifests of one attempt in the order of creation: Service, ConfigMap, PodGroup, one pod per node."""
    pod_group = build_pod_group(run_plan)
    return (
        build_service(run_plan),
        build_config_map(run_plan),
        *(() if pod_group is None else (pod_group,)),
        *build_pods(run_plan),
    )


def build_service(run_plan: RunPlan) -> Manifest:
    """Return the headless Service that gives each pod a DNS name, even before the pod is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build_metadata(run_plan, run_plan.service_name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB_UID: run_plan.job_uid},
            "ports": [
                {"name": "master", "port": run_plan.spec.network.master_port},
                {"name": names.STATUS_PORT_NAME, "port": run_plan.spec.status_port},
            ],
        },
    }


def is_intact_headless_service(service: Manifest, job_uid: str) -> bool:
    """Return whether a Service still has the fields of build_service that the DNS names of the pods require."""
    spec = service["spec"]
    headless = spec.get("clusterIP") == "None" and spec.get("publishNotReadyAddresses", False)
    return bool(headless and spec.get("selector") == {names.JOB_UID: job_uid})
