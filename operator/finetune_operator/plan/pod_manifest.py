"""Builds the pod manifest of one node.

plan.pod_environment builds the environment variables of the container.
"""

from typing import Any

from finetune_api.v1alpha1.pod_types import VOLUME_SOURCES, Volume
from finetune_operator import names
from finetune_operator.plan.config_map import build_supervisor_start
from finetune_operator.plan.object_metadata import Manifest, build_metadata
from finetune_operator.plan.pod_environment import NODE_RANK_VARIABLES, build_env_list
from finetune_operator.plan.pod_group import build_group_fields
from finetune_operator.plan.pod_placement import build_pod_placement, build_ports, build_topology_spread
from finetune_operator.plan.run_plan import NodePlan, RunPlan
from finetune_supervisor.contract import to_camel

LOST_NODE_SECONDS = 60  # time until pods on an unreachable Kubernetes node are evicted

RESTRICTED_POD = {
    "runAsNonRoot": True,
    "runAsUser": names.USER_ID,
    "runAsGroup": names.USER_ID,
    "fsGroup": names.USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def build_pods(run_plan: RunPlan) -> tuple[Manifest, ...]:
    """Return the manifests of the pods of all nodes, which share the nested objects that do not depend on the node."""
    first = build_pod(run_plan, run_plan.nodes[0])
    return (first, *(_change_node(first, node) for node in run_plan.nodes[1:]))


def _change_node(pod: Manifest, node: NodePlan) -> Manifest:
    """Return the pod of another node; build_pod returns the same in twenty times as long."""
    metadata, spec, rank = pod["metadata"], pod["spec"], str(node.node_rank)
    (container,) = spec["containers"]
    env = [{**each, "value": rank} if each["name"] in NODE_RANK_VARIABLES else each for each in container["env"]]
    return {
        **pod,
        "metadata": {**metadata, "name": node.pod_name, "labels": {**metadata["labels"], names.NODE_RANK: rank}},
        "spec": {**spec, "hostname": node.pod_name, "containers": [{**container, "env": env}]},
    }


def build_pod(run_plan: RunPlan, node: NodePlan) -> Manifest:
    """Return the manifest of the pod of one node, which is never restarted in place."""
    template = run_plan.spec.pod_template
    metadata = build_metadata(run_plan, node.pod_name, with_attempt_label=True)
    group = build_group_fields(run_plan)
    metadata["labels"] = {
        **template.labels,
        **metadata["labels"],
        **group.labels,
        names.NODE_RANK: str(node.node_rank),
    }
    start_key = {names.START_KEY: run_plan.start_key} if run_plan.start_key else {}
    if annotations := {**template.annotations, **group.annotations, **start_key}:
        metadata["annotations"] = annotations
    placement: Manifest = {
        "nodeSelector": dict(template.node_selector),
        "affinity": exclude_nodes(template.affinity, run_plan.avoided_nodes),
        "priorityClassName": template.priority_class_name,
        "schedulerName": template.scheduler_name,
        "runtimeClassName": template.runtime_class_name,
        "serviceAccountName": template.service_account_name,
        "imagePullSecrets": [{"name": secret.name} for secret in run_plan.spec.image_pull_secrets],
        **group.pod_spec,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "restartPolicy": "Never",
            "hostname": node.pod_name,
            "subdomain": run_plan.service_name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": run_plan.spec.termination_grace_period_seconds,
            "securityContext": RESTRICTED_POD if template.security_context is None else template.security_context,
            "tolerations": _build_tolerations(run_plan),
            "topologySpreadConstraints": build_topology_spread(run_plan),
            **build_pod_placement(run_plan),
            **{key: value for key, value in placement.items() if value},
            "containers": [_build_container(run_plan, node)],
            "volumes": _build_volumes(run_plan),
        },
    }


def _build_tolerations(run_plan: RunPlan) -> list[Manifest]:
    """Return the user's tolerations, with 60 s instead of the default 300 s for a lost Kubernetes node."""
    user_tolerations = run_plan.spec.pod_template.tolerations
    lost_node_tolerations = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if not any(
            toleration.key in (None, key) and toleration.effect in (None, "NoExecute")
            for toleration in user_tolerations
        )
    ]
    rendered_tolerations = (toleration.model_dump(by_alias=True, exclude_none=True) for toleration in user_tolerations)
    return [*rendered_tolerations, *lost_node_tolerations]


def _build_container(run_plan: RunPlan, node: NodePlan) -> Manifest:
    resources = run_plan.spec.resources.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    security = run_plan.spec.pod_template.container_security_context
    container: Manifest = {
        "name": names.CONTAINER,
        "image": run_plan.image,
        "env": build_env_list(run_plan, node),
        "ports": build_ports(run_plan),
        "securityContext": RESTRICTED_CONTAINER if security is None else security,
        "terminationMessagePath": names.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _build_mounts(run_plan),
    }
    if run_plan.spec.command:
        container["command"] = build_supervisor_start(run_plan)
    if resources:
        container["resources"] = resources
    if run_plan.spec.image_pull_policy:
        container["imagePullPolicy"] = run_plan.spec.image_pull_policy
    return container


def _build_volumes(run_plan: RunPlan) -> list[Manifest]:
    output = run_plan.spec.output
    claim = output and {"claimName": output.persistent_volume_claim.claim_name}
    return [
        {"name": "config", "configMap": {"name": run_plan.config_map_name}},
        *([{"name": "output", "persistentVolumeClaim": claim}] if claim else []),
        {"name": "run", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": _build_memory_volume(run_plan.spec.shm_bytes)},
        *(_build_volume(volume) for volume in run_plan.spec.volumes),
    ]


def _build_memory_volume(size_bytes: int | None) -> Manifest:
    """Return the source of a volume in memory; without a size, the kubelet limits it to the node's memory."""
    return {"medium": "Memory"} if size_bytes is None else {"medium": "Memory", "sizeLimit": str(size_bytes)}


def _build_volume(volume: Volume) -> Manifest:
    source = next(name for name in VOLUME_SOURCES if getattr(volume, name) is not None)
    body = volume.model_dump(by_alias=True, exclude_none=True)[to_camel(source)]
    return {"name": volume.name, to_camel(source): body}


def _build_mounts(run_plan: RunPlan) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": names.CONFIG_DIR, "readOnly": True},
        *([{"name": "output", "mountPath": names.OUTPUT_DIR}] if run_plan.spec.output else []),
        {"name": "run", "mountPath": names.RUN_DIR},
        {"name": "tmp", "mountPath": names.TMP_DIR},
        {"name": "shm", "mountPath": names.SHM_DIR},
    ]
    return mounts + [_build_mount(volume) for volume in run_plan.spec.volumes]


def _build_mount(volume: Volume) -> Manifest:
    mount: Manifest = {"name": volume.name, "mountPath": volume.mount_path}
    if volume.sub_path:
        mount["subPath"] = volume.sub_path
    if volume.read_only:
        mount["readOnly"] = True
    return mount


def exclude_nodes(affinity: dict[str, Any] | None, nodes: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the affinity extended to exclude these Kubernetes nodes (decisions/207).

    Node selector terms are alternatives, so each term has to exclude the nodes. matchFields allows one value per
    expression.
    """
    if not nodes:
        return affinity
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    extended = dict(affinity or {})
    node_affinity = dict(extended.get("nodeAffinity") or {})
    required = dict(node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [{**term, "matchFields": [*term.get("matchFields", ()), *fields]} for term in terms]
    node_affinity["requiredDuringSchedulingIgnoredDuringExecution"] = required
    return {**extended, "nodeAffinity": node_affinity}
