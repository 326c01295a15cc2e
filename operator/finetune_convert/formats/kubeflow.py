"""Converts manifests of Kubeflow: PyTorchJob (v1) and TrainJob (v2)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from finetune_api.v1alpha1.pod_types import VOLUME_SOURCES
from finetune_convert.conversion import ConversionError, EntryEffect, JobForm, Tree
from finetune_convert.data_paths import DataPaths
from finetune_convert.formats.kubeflow_scheduling import convert_metadata, convert_scheduling_policy, get_object
from finetune_convert.job_draft import JobDraft
from finetune_convert.launch.environment import NETWORK_VARIABLES, RESERVED_PREFIXES, add_environment
from finetune_convert.launch.launchers import Launch, unwrap
from finetune_convert.launch.topology import DEVICE_VARIABLES
from finetune_convert.mapping.program import convert_arguments
from finetune_convert.mapping.tool_input import ToolInput, build_name, start_draft
from finetune_convert.shell.commands import read_script
from finetune_convert.shell.words import Word
from finetune_supervisor.contract import to_camel

_RESERVED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "NPROC_PER_NODE")
_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")
_POD_FIELDS = {
    "nodeSelector": "podTemplate.nodeSelector",
    "tolerations": "podTemplate.tolerations",
    "affinity": "podTemplate.affinity",
    "priorityClassName": "podTemplate.priorityClassName",
    "schedulerName": "podTemplate.schedulerName",
    "runtimeClassName": "podTemplate.runtimeClassName",
    "serviceAccountName": "podTemplate.serviceAccountName",
    "securityContext": "podTemplate.securityContext",
    "imagePullSecrets": "imagePullSecrets",
    "hostNetwork": "podTemplate.hostNetwork",
    "schedulingGates": "podTemplate.schedulingGates",
    "resourceClaims": "podTemplate.resourceClaims",
    "topologySpreadConstraints": "podTemplate.topologySpreadConstraints",
}
_VOLUME_SOURCES = tuple(map(to_camel, VOLUME_SOURCES))
_HANDLED_POD = ("containers", "volumes", "restartPolicy", *_POD_FIELDS)
_HANDLED_CONTAINER = (
    "name",
    "image",
    "command",
    "args",
    "env",
    "resources",
    "volumeMounts",
    "workingDir",
    "imagePullPolicy",
    "securityContext",
    "ports",
)
_RUN_POLICY = {
    "activeDeadlineSeconds": "activeDeadlineSeconds",
    "ttlSecondsAfterFinished": "ttlSecondsAfterFinished",
    "suspend": "suspend",
    "backoffLimit": "restartPolicy.maxRestarts",
}


def convert_kubeflow(source: ToolInput, manifests: Sequence[Tree]) -> tuple[str, JobDraft]:
    """Convert the single PyTorchJob or TrainJob of the manifests.

    Raises: ConversionError
    """
    jobs = [manifest for manifest in manifests if manifest.get("kind") in ("PyTorchJob", "TrainJob")]
    if len(jobs) != 1:
        raise ConversionError(f"expected one PyTorchJob or TrainJob, found {len(jobs)}")
    if source.request.form is JobForm.TRAINER:
        raise ConversionError("--form trainer: a job of Kubeflow can only run as a command; remove --form")
    (job,) = jobs
    metadata = get_object(job, "metadata")
    draft = start_draft(source, build_name(str(metadata.get("name", "job"))))
    for other in manifests:
        if other is not job:
            draft.note(
                str(other.get("kind", "document")), EntryEffect.UNUSED, "only the job is converted; keep this object"
            )
    convert_metadata(draft, metadata, "metadata")
    if job["kind"] == "PyTorchJob":
        _convert_pytorch_job(draft, get_object(job, "spec"))
    else:
        _convert_train_job(draft, get_object(job, "spec"))
    draft.add_output()
    return f"Kubeflow {job['kind']}", draft


def _read_int(value: Any, path: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConversionError(f"{path}: expected an integer, found {str(value)[:40]}") from None


def _list(node: Any, key: str) -> list[Any]:
    value = node.get(key) if isinstance(node, dict) else None
    return value if isinstance(value, list) else []


def _convert_pytorch_job(draft: JobDraft, spec: Tree) -> None:
    replicas = get_object(spec, "pytorchReplicaSpecs")
    master, worker = get_object(replicas, "Master"), get_object(replicas, "Worker")
    if not master and not worker:
        raise ConversionError("spec.pytorchReplicaSpecs: expected Master, Worker or both")
    nodes = sum(_read_int(replica.get("replicas") or 1, "replicas") for replica in (master, worker) if replica)
    _set_nodes(draft, nodes, "pytorchReplicaSpecs")
    template = get_object(master or worker, "template")
    convert_metadata(draft, get_object(template, "metadata"), "template.metadata")
    pod = get_object(template, "spec")
    if master and worker and _strip(get_object(get_object(worker, "template"), "spec")) != _strip(pod):
        message = (
            "Master and Worker have different pods; those of Master are taken, because all nodes of a job are equal"
        )
        draft.note("pytorchReplicaSpecs.Worker", EntryEffect.CHANGED, message)
    for replica in (master, worker):
        if "restartPolicy" in replica:
            draft.note("restartPolicy", EntryEffect.SAME, "all ranks restart together: spec.restartPolicy")
    _convert_policy(draft, get_object(spec, "runPolicy"))
    if (per_node := spec.get("nprocPerNode")) not in (None, "auto", "gpu", "cpu"):
        draft.set("nprocPerNode", _read_int(per_node, "nprocPerNode"))
        draft.note("nprocPerNode", EntryEffect.TAKEN, "", field="nprocPerNode")
    if "elasticPolicy" in spec:
        draft.note("elasticPolicy", EntryEffect.CHANGED, "the number of nodes is fixed: numNodes")
    _note_rest(draft, "spec", spec, ("pytorchReplicaSpecs", "runPolicy", "nprocPerNode", "elasticPolicy"))
    _convert_pod(draft, pod, "pytorch")


def _note_rest(draft: JobDraft, path: str, node: Tree, handled: Sequence[str]) -> None:
    """Add an entry for each key of an object that is not handled."""
    for key in node:
        if key not in handled:
            draft.note(f"{path}.{key}", EntryEffect.CHANGED, "has no field in a FineTuneJob")


def _strip(pod: Tree) -> Tree:
    """Return a pod without the name of its container, which differs without effect."""
    containers = [
        {key: value for key, value in c.items() if key != "name"}
        for c in _list(pod, "containers")
        if isinstance(c, dict)
    ]
    return {**pod, "containers": containers}


def _set_nodes(draft: JobDraft, nodes: int, option: str) -> None:
    if nodes > 1:
        draft.set("numNodes", nodes)
    draft.note(option, EntryEffect.MAPPED, f"{nodes} nodes", field="numNodes")


def _convert_policy(draft: JobDraft, policy: Tree) -> None:
    for key, value in policy.items():
        if key == "schedulingPolicy" and isinstance(value, dict):
            convert_scheduling_policy(draft, value)
        elif key in _RUN_POLICY and value is not None:
            draft.set(_RUN_POLICY[key], value)
            draft.note(f"runPolicy.{key}", EntryEffect.MAPPED, f"is {value}", field=_RUN_POLICY[key])
        else:
            reason = "is not needed: " + (
                "finished pods are kept" if key == "cleanPodPolicy" else "see the operator's scheduling"
            )
            draft.note(
                f"runPolicy.{key}", EntryEffect.UNUSED if key == "cleanPodPolicy" else EntryEffect.CHANGED, reason
            )


def _convert_pod(draft: JobDraft, pod: Tree, main: str) -> None:
    containers = [container for container in _list(pod, "containers") if isinstance(container, dict)]
    container = next((c for c in containers if c.get("name") == main), containers[0] if containers else None)
    if container is None:
        raise ConversionError("template.spec.containers: expected the container of the training")
    if len(containers) > 1:
        draft.note(
            "containers", EntryEffect.CHANGED, "only the training container is taken; a FineTuneJob has no sidecars"
        )
    for key, path in _POD_FIELDS.items():
        if pod.get(key) is not None:
            draft.set(path, pod[key])
            draft.note(f"template.spec.{key}", EntryEffect.TAKEN, "", field=path)
    _note_rest(draft, "template.spec", pod, _HANDLED_POD)
    _note_rest(draft, "container", container, _HANDLED_CONTAINER)
    _convert_container(draft, container)
    _convert_volumes(draft, pod, container)


def _convert_container(draft: JobDraft, container: Tree) -> None:
    image = draft.request.image or container.get("image")
    draft.set("image", str(image) if image else "registry.example/pytorch:latest")
    draft.note(
        "image",
        EntryEffect.TAKEN if image else EntryEffect.EDIT,
        "" if image else "name the image with --image",
        field="image",
    )
    for key, path in (
        ("imagePullPolicy", "imagePullPolicy"),
        ("securityContext", "podTemplate.containerSecurityContext"),
    ):
        if container.get(key) is not None:
            draft.set(path, container[key])
            draft.note(f"container.{key}", EntryEffect.TAKEN, "", field=path)
    _convert_resources(draft, get_object(container, "resources"))
    _convert_env(draft, _list(container, "env"))
    words = [str(word) for key in ("command", "args") for word in _list(container, key)]
    _set_command(draft, words, container.get("workingDir"))


def _convert_resources(draft: JobDraft, resources: Tree) -> None:
    for key in ("limits", "requests"):
        values = get_object(resources, key)
        if values:
            draft.set(f"resources.{key}", dict(values))
            draft.note(f"resources.{key}", EntryEffect.TAKEN, "", field=f"resources.{key}")
    if claims := _list(resources, "claims"):
        draft.set("resources.claims", claims)
        draft.note("resources.claims", EntryEffect.TAKEN, "", field="resources.claims")


def _convert_env(draft: JobDraft, env: Sequence[Any]) -> None:
    plain: dict[str, Word] = {}
    for variable in env:
        name = str(variable.get("name")) if isinstance(variable, dict) else ""
        if name in _RESERVED or name.startswith(RESERVED_PREFIXES):
            draft.note(name, EntryEffect.SAME, "the operator sets it for every pod")
        elif isinstance(variable, dict) and "valueFrom" in variable:
            draft.spec["env"] = [*draft.spec.get("env", []), {"name": name, "valueFrom": variable["valueFrom"]}]
            draft.note(name, EntryEffect.TAKEN, "", field="env")
        elif name:
            plain[name] = Word(str(variable.get("value") or ""), 1)
    add_environment(
        draft, plain, handled=DEVICE_VARIABLES if "CUDA_VISIBLE_DEVICES" in plain else (), for_trainer=False
    )
    draft.entries = [
        entry if entry.option not in {*plain, *NETWORK_VARIABLES} else replace(entry, line=None)
        for entry in draft.entries
    ]


def _set_command(draft: JobDraft, words: Sequence[str], directory: object) -> None:
    if not words:
        raise ConversionError(
            "the container has no command; its image's entrypoint is unknown: add command to the manifest"
        )
    launch = _read_launch(draft, words)
    paths = DataPaths(draft)
    program, *rest = launch.program
    arguments = convert_arguments(rest, draft, paths)
    draft.entries = [replace(entry, line=None) for entry in draft.entries]
    if launch.launcher == "torchrun" and program.text.endswith(".py") and not launch.is_module:
        draft.spec["command"] = {"script": program.text, **({"args": arguments} if arguments else {})}
        if launch.ranks_per_node and "nprocPerNode" not in draft.spec:
            draft.set("nprocPerNode", launch.ranks_per_node)
    elif launch.launcher == "torchrun":
        module = ["-m"] if launch.is_module else []
        draft.spec["command"] = {"exec": ["torchrun", *module, program.text, *arguments]}
    else:
        draft.spec["command"] = {"exec": [re.sub(r"\$(?=\(\w+\))", "$$", program.text), *arguments]}
    if directory:
        draft.set("command.workingDir", str(directory))
        draft.note("container.workingDir", EntryEffect.TAKEN, "", field="command.workingDir")
    draft.note("container.command", EntryEffect.MAPPED, f"starts {program.text}", field="command")


def _read_launch(draft: JobDraft, words: Sequence[str]) -> Launch:
    """Return the launch of a command; a shell that only starts torchrun is read as shell text."""
    tokens = tuple(Word(word, 1) for word in words)
    if words[0] in _SHELLS and len(words) == 3 and words[1] in ("-c", "-lc"):
        script = read_script(words[2])
        if len(script.commands) == 1 and not script.problems:
            launch = unwrap(script.commands[0].words)
            if launch.launcher == "torchrun":
                draft.entries += launch.entries
                return launch
        return Launch(tokens)
    launch = unwrap(tokens)
    draft.entries += launch.entries
    return launch if launch.launcher == "torchrun" else Launch(tokens)


def _convert_volumes(draft: JobDraft, pod: Tree, container: Tree) -> None:
    volumes = {str(v.get("name")): v for v in _list(pod, "volumes") if isinstance(v, dict)}
    converted: list[Tree] = []
    for index, mount in enumerate(m for m in _list(container, "volumeMounts") if isinstance(m, dict)):
        name, path = str(mount.get("name")), str(mount.get("mountPath", "")).rstrip("/")
        volume = volumes.get(name, {})
        sources = {key: volume[key] for key in _VOLUME_SOURCES if volume.get(key) is not None}
        if path == "/dev/shm":  # noqa: S108
            size = get_object(volume, "emptyDir").get("sizeLimit")
            if size:
                draft.set("shmSize", size)
            draft.note(name, EntryEffect.MAPPED, "every pod has /dev/shm in memory", field="shmSize")
        elif not sources:
            draft.note(
                name,
                EntryEffect.CHANGED,
                f"the source of the volume is not one of {', '.join(_VOLUME_SOURCES)}",
                field="volumes",
            )
        else:
            converted.append(
                _build_volume(f"{name}-{index}" if any(v["name"] == name for v in converted) else name, mount, sources)
            )
            draft.note(name, EntryEffect.TAKEN, "", field="volumes")
    if converted:
        draft.spec["volumes"] = converted


def _build_volume(name: str, mount: Mapping[str, Any], sources: Tree) -> Tree:
    claim = sources.get("persistentVolumeClaim")
    if isinstance(claim, dict):
        sources = {"persistentVolumeClaim": {"claimName": claim.get("claimName")}}
    volume = {"name": name, "mountPath": str(mount.get("mountPath", "")), **sources}
    for key in ("subPath", "readOnly"):
        if mount.get(key):
            volume[key] = mount[key]
    return volume


def _convert_train_job(draft: JobDraft, spec: Tree) -> None:
    trainer, runtime = get_object(spec, "trainer"), get_object(spec, "runtimeRef")
    name = str(runtime.get("name", ""))
    if name:
        draft.note(
            "runtimeRef",
            EntryEffect.MAPPED,
            f"{name}: its image and settings are not part of the input; the ranks start as with torchrun",
        )
    nodes = _read_int(trainer.get("numNodes") or 1, "trainer.numNodes")
    _set_nodes(draft, nodes, "trainer.numNodes")
    if (per_node := trainer.get("numProcPerNode")) not in (None, "auto", "gpu", "cpu"):
        draft.set("nprocPerNode", _read_int(per_node, "trainer.numProcPerNode"))
        draft.note("trainer.numProcPerNode", EntryEffect.TAKEN, "", field="nprocPerNode")
    if spec.get("suspend"):
        draft.set("suspend", True)
        draft.note("suspend", EntryEffect.TAKEN, "", field="suspend")
    for key in (
        "initializer",
        "podTemplateOverrides",
        "runtimePatches",
        "podSpecOverrides",
        "managedBy",
        "labels",
        "annotations",
    ):
        if spec.get(key):
            effect, reason = (
                (EntryEffect.UNUSED, "the operator manages the job")
                if key == "managedBy"
                else (EntryEffect.CHANGED, "it is not converted; set model, dataset or podTemplate in the job")
            )
            draft.note(f"spec.{key}", effect, reason)
    handled = ("image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode")
    _note_rest(draft, "trainer", trainer, handled)
    container: Tree = {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
    _convert_container(draft, {**container, "resources": get_object(trainer, "resourcesPerNode")})
