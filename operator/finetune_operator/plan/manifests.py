"""RunPlan -> the Service, ConfigMap and pods of one attempt, as the dicts that the API takes."""

import math
from typing import Any

from finetune_api.v1alpha1.base import to_camel
from finetune_api.v1alpha1.pod_types import VOLUME_SOURCES, Volume
from finetune_api.v1alpha1.quantity import parse_quantity
from finetune_operator import names
from finetune_operator.failures.node_avoidance import keep_away
from finetune_operator.plan.run_plan import NodePlan, RunPlan

Manifest = dict[str, Any]

GRACE_SECONDS = 120  # long enough for a checkpoint
TORCHRUN_MARGIN_SECONDS = 10  # torchrun must give up before the kubelet does
LOST_NODE_SECONDS = 60

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
    """Everything one attempt needs: Service, ConfigMap, then one pod per node."""
    return (build_service(run), build_config_map(run), *(build_pod(run, node) for node in run.nodes))


def build_service(run: RunPlan) -> Manifest:
    """Headless, so that it only gives the pods names; not-ready ones too, because they must meet to get ready."""
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


def names_pods(service: Manifest, job_uid: str) -> bool:
    """Whether a Service still does what build_service made it for."""
    spec = service["spec"]
    headless = spec.get("clusterIP") == "None" and spec.get("publishNotReadyAddresses", False)
    return bool(headless and spec.get("selector") == {names.JOB_UID: job_uid})


def build_config_map(run: RunPlan) -> Manifest:
    """The validated spec, which the trainer parses with the same class; for the user's own image the supervisor too."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(run, run.config_map_name, attempt=True),
        "immutable": True,
        "data": {names.CONFIG_KEY: run.spec.model_dump_json(by_alias=True, exclude_unset=True)},
        **({"binaryData": {names.SUPERVISOR_KEY: run.supervisor}} if run.spec.command else {}),
    }


def build_pod(run: RunPlan, node: NodePlan) -> Manifest:
    """One node of the attempt: a bare pod that never restarts in place."""
    template = run.spec.pod_template
    metadata = _metadata(run, node.pod_name, attempt=True)
    metadata["labels"] = {**template.labels, **metadata["labels"], names.NODE_RANK: str(node.node_rank)}
    if template.annotations:
        metadata["annotations"] = dict(template.annotations)
    placement: Manifest = {
        "nodeSelector": dict(template.node_selector),
        "affinity": keep_away(template.affinity, run.avoids),
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
            "topologySpreadConstraints": [_spread(run)],
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


def _spread(run: RunPlan) -> Manifest:
    """Nodes of one attempt on different machines where there is room: two on one share its memory and its fate."""
    return {
        "topologyKey": "kubernetes.io/hostname",
        "maxSkew": 1,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {names.JOB_UID: run.job_uid, names.ATTEMPT: str(run.attempt)}},
    }


def _tolerations(run: RunPlan) -> list[Manifest]:
    """The user's, and a shorter wait than the admission default of 300 s for a node that went away."""
    given = run.spec.pod_template.tolerations
    lost = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if not any(theirs.key in (None, key) and theirs.effect in (None, "NoExecute") for theirs in given)
    ]
    return [*(toleration.model_dump(by_alias=True, exclude_none=True) for toleration in given), *lost]


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
    """Ours, then the user's, who may replace what is not reserved."""
    ours = [{"name": name, "value": value} for name, value in build_environment(run, node).items()]
    theirs = [variable.model_dump(by_alias=True, exclude_none=True) for variable in run.spec.env]
    replaced = {variable["name"] for variable in theirs}
    return [variable for variable in ours if variable["name"] not in replaced] + theirs


def build_environment(run: RunPlan, node: NodePlan) -> dict[str, str]:
    """What drives launcher, trainer and NCCL; never RANK, which scripts take for a running torchrun."""
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
        "USER": names.USER,  # torch's caches ask for a name, and an image of the user's own may not know our id
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
    """Where results and downloads go; those of a job without an output stay in the pod's own HOME."""
    if run.spec.output is None:
        return {}
    return {
        "HF_HOME": f"{names.OUTPUT_DIR}/cache/huggingface",
        names.ENV_CACHE_DIR: f"{names.OUTPUT_DIR}/cache",
        names.ENV_OUTPUT: f"{names.OUTPUT_DIR}/{run.output_folder}",
    }


def _secret_environment(run: RunPlan) -> dict[str, str]:
    """Which variables nobody may quote."""
    given = [variable.name for variable in run.spec.env if "secretKeyRef" in (variable.value_from or {})]
    return {names.ENV_HIDDEN: ",".join(given)} if given else {}


def _network_environment(run: RunPlan) -> dict[str, str]:
    network = run.spec.network
    settings = network.nccl.model_dump(exclude_none=True)
    variables = {f"NCCL_{name.upper()}": str(int(v) if isinstance(v, bool) else v) for name, v in settings.items()}
    if network.interface:
        variables |= {"GLOO_SOCKET_IFNAME": network.interface, "NCCL_SOCKET_IFNAME": network.interface}
    return variables


def _threads_per_rank(run: RunPlan) -> int:
    """Ranks share the node's cores; without a limit, torchrun's own default of one thread."""
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
    ours: list[Manifest] = [
        {"name": "config", "mountPath": names.CONFIG_DIR, "readOnly": True},
        *([{"name": "output", "mountPath": names.OUTPUT_DIR}] if run.spec.output else []),
        {"name": "run", "mountPath": names.RUN_DIR},
        {"name": "tmp", "mountPath": names.TMP_DIR},
        {"name": "shm", "mountPath": names.SHM_DIR},
    ]
    return ours + [_mount(volume) for volume in run.spec.volumes]


def _mount(volume: Volume) -> Manifest:
    mount: Manifest = {"name": volume.name, "mountPath": volume.mount_path}
    if volume.sub_path:
        mount["subPath"] = volume.sub_path
    if volume.read_only:
        mount["readOnly"] = True
    return mount
