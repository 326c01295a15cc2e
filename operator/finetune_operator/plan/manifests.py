"""Manifests of the Service, ConfigMap and pods of one attempt, built from its run plan."""

import math
from typing import Any

from finetune_api.v1alpha1.pod_types import VOLUME_SOURCES, Volume
from finetune_api.v1alpha1.quantity import parse_quantity
from finetune_operator import names
from finetune_operator.plan.run_plan import NodePlan, RunPlan
from finetune_supervisor.contract import to_camel

Manifest = dict[str, Any]

GRACE_SECONDS = 120  # time to write a checkpoint
TORCHRUN_MARGIN_SECONDS = 10  # torchrun has to stop its ranks before the kubelet sends SIGKILL
LOST_NODE_SECONDS = 60  # until pods on an unreachable Kubernetes node are evicted

RESTRICTED_POD = {
    "runAsNonRoot": True,
    "runAsUser": names.USER_ID,
    "runAsGroup": names.USER_ID,
    "fsGroup": names.USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def build_children(run: RunPlan) -> tuple[Manifest, ...]:
    """Return the manifests of one attempt in the order of creation: Service, ConfigMap, one pod per node."""
    return (build_service(run), build_config_map(run), *(build_pod(run, node) for node in run.nodes))


def build_service(run: RunPlan) -> Manifest:
    """Return the headless Service that gives each pod a DNS name, also before it is ready: ranks connect first."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(run, run.service_name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB_UID: run.job_uid},
            "ports": [
                {"name": "master", "port": run.spec.network.master_port},
                {"name": "status", "port": names.STATUS_PORT},
            ],
        },
    }


def is_intact_headless_service(service: Manifest, job_uid: str) -> bool:
    """Return whether a Service still has the fields of build_service that give the pods their DNS names."""
    spec = service["spec"]
    headless = spec.get("clusterIP") == "None" and spec.get("publishNotReadyAddresses", False)
    return bool(headless and spec.get("selector") == {names.JOB_UID: job_uid})


def build_config_map(run: RunPlan) -> Manifest:
    """Return the ConfigMap with the validated spec, and with the supervisor for jobs with a command."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(run, run.config_map_name, attempt=True),
        "immutable": True,
        "data": {names.CONFIG_KEY: run.spec.model_dump_json(by_alias=True, exclude_unset=True)},
        **({"binaryData": {names.SUPERVISOR_KEY: run.supervisor}} if run.spec.command else {}),
    }


def build_pod(run: RunPlan, node: NodePlan) -> Manifest:
    """Return the manifest of one node: a bare pod that is never restarted in place."""
    template = run.spec.pod_template
    metadata = _metadata(run, node.pod_name, attempt=True)
    metadata["labels"] = {**template.labels, **metadata["labels"], names.NODE_RANK: str(node.node_rank)}
    if template.annotations:
        metadata["annotations"] = dict(template.annotations)
    placement: Manifest = {
        "nodeSelector": dict(template.node_selector),
        "affinity": exclude_nodes(template.affinity, run.avoids),
        "priorityClassName": template.priority_class_name,
        "schedulerName": template.scheduler_name,
        "runtimeClassName": template.runtime_class_name,
        "serviceAccountName": template.service_account_name,
        "imagePullSecrets": [{"name": secret.name} for secret in run.spec.image_pull_secrets],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "restartPolicy": "Never",
            "hostname": node.pod_name,
            "subdomain": run.service_name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": RESTRICTED_POD if template.security_context is None else template.security_context,
            "tolerations": _tolerations(run),
            "topologySpreadConstraints": [_topology_spread(run)],
            **{key: value for key, value in placement.items() if value},
            "containers": [_container(run, node)],
            "volumes": _volumes(run),
        },
    }


def _metadata(run: RunPlan, name: str, *, attempt: bool = False) -> Manifest:
    labels = {names.MANAGED_BY: names.MANAGER, names.JOB_NAME: run.job_name, names.JOB_UID: run.job_uid}
    if attempt:
        labels[names.ATTEMPT] = str(run.attempt)
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.FINETUNEJOB_KIND,
        "name": run.job_name,
        "uid": run.job_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"name": name, "namespace": run.namespace, "labels": labels, "ownerReferences": [owner]}


def _topology_spread(run: RunPlan) -> Manifest:
    """Prefer different Kubernetes nodes for the nodes of an attempt: on one they share memory and its failures."""
    return {
        "topologyKey": "kubernetes.io/hostname",
        "maxSkew": 1,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {names.JOB_UID: run.job_uid, names.ATTEMPT: str(run.attempt)}},
    }


def _tolerations(run: RunPlan) -> list[Manifest]:
    """Return the tolerations of the user, and 60 s for a lost Kubernetes node instead of the default 300 s."""
    user_tolerations = run.spec.pod_template.tolerations
    lost_node = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if not any(each.key in (None, key) and each.effect in (None, "NoExecute") for each in user_tolerations)
    ]
    return [*(toleration.model_dump(by_alias=True, exclude_none=True) for toleration in user_tolerations), *lost_node]


def _container(run: RunPlan, node: NodePlan) -> Manifest:
    resources = run.spec.resources.model_dump(by_alias=True, exclude_defaults=True)
    security = run.spec.pod_template.container_security_context
    container: Manifest = {
        "name": names.CONTAINER,
        "image": run.image,
        "env": _environment(run, node),
        "ports": [{"name": "status", "containerPort": names.STATUS_PORT}],
        "securityContext": RESTRICTED_CONTAINER if security is None else security,
        "terminationMessagePath": names.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(run),
    }
    if run.spec.command:
        container["command"] = ["python3", f"{names.CONFIG_DIR}/{names.SUPERVISOR_KEY}"]
    if resources:
        container["resources"] = resources
    if run.spec.image_pull_policy:
        container["imagePullPolicy"] = run.spec.image_pull_policy
    return container


def _environment(run: RunPlan, node: NodePlan) -> list[Manifest]:
    """Return the operator's variables, then those of the user, who may override any that is not reserved."""
    own = [{"name": name, "value": value} for name, value in build_environment(run, node).items()]
    user = [variable.model_dump(by_alias=True, exclude_none=True) for variable in run.spec.env]
    overridden = {variable["name"] for variable in user}
    return [variable for variable in own if variable["name"] not in overridden] + user


def build_environment(run: RunPlan, node: NodePlan) -> dict[str, str]:
    """Return the variables of launcher, trainer and NCCL; never RANK, by which scripts detect torchrun."""
    torchrun = {
        "NNODES": str(len(run.nodes)),
        "NODE_RANK": str(node.node_rank),
        "NPROC_PER_NODE": str(run.nproc_per_node),
        "MASTER_ADDR": run.master_addr,
        "MASTER_PORT": str(run.spec.network.master_port),
    }
    return {
        **torchrun,
        **{f"PET_{name}": value for name, value in torchrun.items()},
        "OMP_NUM_THREADS": str(_threads_per_rank(run)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS - TORCHRUN_MARGIN_SECONDS),
        "HOME": names.TMP_DIR,
        "USER": names.USER,  # torch caches call getuser(), which fails for a uid without passwd entry
        "PYTHONUNBUFFERED": "1",
        **_output_environment(run),
        names.ENV_NAMESPACE: run.namespace,
        names.ENV_JOB: run.job_name,
        names.ENV_JOB_UID: run.job_uid,
        names.ENV_ATTEMPT: str(run.attempt),
        names.ENV_WORLD_SIZE: str(run.world_size),
        names.ENV_CONFIG: f"{names.CONFIG_DIR}/{names.CONFIG_KEY}",
        names.ENV_RUN_DIR: names.RUN_DIR,
        names.ENV_TERMINATION_LOG: names.TERMINATION_LOG,
        names.ENV_STATUS_PORT: str(names.STATUS_PORT),
        names.ENV_GRACE_SECONDS: str(GRACE_SECONDS),
        names.ENV_HANG_SECONDS: str(run.spec.hang_seconds),
        **_network_environment(run),
        **_secret_environment(run),
    }


def _output_environment(run: RunPlan) -> dict[str, str]:
    """Return the paths of results and downloads; without spec.output, downloads go to HOME in the pod."""
    if run.spec.output is None:
        return {}
    return {
        "HF_HOME": f"{names.OUTPUT_DIR}/cache/huggingface",
        names.ENV_CACHE_DIR: f"{names.OUTPUT_DIR}/cache",
        names.ENV_OUTPUT: f"{names.OUTPUT_DIR}/{run.output_folder}",
    }


def _secret_environment(run: RunPlan) -> dict[str, str]:
    """Return the names of the variables from Secrets, which the supervisor redacts."""
    secret_names = [variable.name for variable in run.spec.env if "secretKeyRef" in (variable.value_from or {})]
    return {names.ENV_HIDDEN: ",".join(secret_names)} if secret_names else {}


def _network_environment(run: RunPlan) -> dict[str, str]:
    network = run.spec.network
    settings = network.nccl.model_dump(exclude_none=True)
    variables = {f"NCCL_{name.upper()}": str(int(v) if isinstance(v, bool) else v) for name, v in settings.items()}
    if network.interface:
        variables |= {"GLOO_SOCKET_IFNAME": network.interface, "NCCL_SOCKET_IFNAME": network.interface}
    return variables


def _threads_per_rank(run: RunPlan) -> int:
    """Return the CPU limit divided by the ranks of the node; without a limit 1, the default of torchrun."""
    cores = run.spec.resources.limits.get("cpu")
    return max(1, math.floor(parse_quantity(cores) / run.nproc_per_node)) if cores is not None else 1


def _volumes(run: RunPlan) -> list[Manifest]:
    output = run.spec.output
    claim = output and {"claimName": output.persistent_volume_claim.claim_name}
    return [
        {"name": "config", "configMap": {"name": run.config_map_name}},
        *([{"name": "output", "persistentVolumeClaim": claim}] if claim else []),
        {"name": "run", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(run.spec.shm_bytes)}},
        *(_volume(volume) for volume in run.spec.volumes),
    ]


def _volume(volume: Volume) -> Manifest:
    source = next(name for name in VOLUME_SOURCES if getattr(volume, name) is not None)
    body = volume.model_dump(by_alias=True, exclude_none=True)[to_camel(source)]
    return {"name": volume.name, to_camel(source): body}


def _mounts(run: RunPlan) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": names.CONFIG_DIR, "readOnly": True},
        *([{"name": "output", "mountPath": names.OUTPUT_DIR}] if run.spec.output else []),
        {"name": "run", "mountPath": names.RUN_DIR},
        {"name": "tmp", "mountPath": names.TMP_DIR},
        {"name": "shm", "mountPath": names.SHM_DIR},
    ]
    return mounts + [_mount(volume) for volume in run.spec.volumes]


def _mount(volume: Volume) -> Manifest:
    mount: Manifest = {"name": volume.name, "mountPath": volume.mount_path}
    if volume.sub_path:
        mount["subPath"] = volume.sub_path
    if volume.read_only:
        mount["readOnly"] = True
    return mount


def exclude_nodes(affinity: dict[str, Any] | None, nodes: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the affinity with these Kubernetes nodes excluded in addition.

    Node selector terms are alternatives, so each of them has to exclude the nodes; matchFields allows one value per
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
