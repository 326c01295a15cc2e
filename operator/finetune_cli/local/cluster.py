"""Implements Cluster on the local host: pods are processes, ConfigMaps are files, Services are cache entries."""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from finetune_cli.local.environment import (
    LOOPBACK,
    NodePlacement,
    build_environment,
    count_cpus_per_node,
    find_free_ports,
)
from finetune_cli.local.parent_watchdog import ParentWatchdog
from finetune_cli.local.pod import LocalPod, NodeProcessSpec
from finetune_cli.local.state_store import StateStore
from finetune_cli.local.trust import hide_credential_files
from finetune_cli.local.volume_mapping import LocalMount
from finetune_operator import names
from finetune_operator.controller.child_cache import ChildCache
from finetune_operator.kube.cluster import NameTaken, ObjectRef
from finetune_operator.observation.ownership import RawBody, get_controller_uid

SUPERVISOR_COMMAND = (sys.executable, "-P", "-m", "finetune_supervisor")  # imports nothing of the working directory


@dataclass(frozen=True)
class LocalResources:
    """Folders, GPUs, environment and command for the nodes of a job.

    gpus: GPU ids of each node, indexed by node rank. environment: the variables of the user that the nodes inherit.
    """

    output: Path
    volumes: tuple[LocalMount, ...]
    gpus: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    hides_credential_files: bool = False
    command: tuple[str, ...] = SUPERVISOR_COMMAND


class LocalCluster:
    """Executes the actions of a reconcile pass with local processes and files."""

    def __init__(
        self,
        resources: LocalResources,
        store: StateStore,
        children: ChildCache,
        *,
        on_event: Callable[[datetime, str, str], None],
    ) -> None:
        self._resources = resources
        self._store = store
        self._children = children
        self._on_event = on_event
        self._pods: dict[str, LocalPod] = {}
        self._ports: dict[str, list[int]] = {}
        self._watchdog = ParentWatchdog()
        self._has_ended = False

    async def write_status(self, job: RawBody, status: RawBody) -> RawBody:
        """Store the status in the state folder next to the output."""
        self._store.write_status(status)
        self._has_ended = "completionTime" in status
        return {**job, "status": status}

    async def list_pods(self, namespace: str, label: str, value: str) -> tuple[RawBody, ...]:
        """Return the pods with this label; the list is never stale, because only this class creates pods."""
        bodies = (pod.body for pod in self._pods.values())
        return tuple(
            body
            for body in bodies
            if (body["metadata"]["namespace"], body["metadata"]["labels"][label]) == (namespace, value)
        )

    async def get(self, kind: str, namespace: str, name: str) -> RawBody | None:
        """Return a ReadWriteMany claim for any name, because all nodes share the local folders; None for pods."""
        if kind == "Pod":
            return None  # single pods are never requested, because list_pods always returns all pods
        return {"metadata": {"name": name, "namespace": namespace}, "spec": {"accessModes": ["ReadWriteMany"]}}

    async def create(self, manifest: RawBody) -> str:
        """Start a process for a pod, write a file for a ConfigMap, and cache a Service; return the uid."""
        uid = f"{manifest['kind'].lower()}-{manifest['metadata']['name']}"
        match manifest["kind"]:
            case "Pod":
                uid = await self._create_pod(manifest)
            case "ConfigMap":
                self._write_config(manifest)
            case "Service":
                self._children.on_service_event(None, {**manifest, "metadata": {**manifest["metadata"], "uid": uid}})
            case kind:
                raise AssertionError(f"local mode does not support {kind}")
        return uid

    async def dry_run_create(self, manifest: RawBody) -> RawBody:
        """Return the manifest, because nothing changes it."""
        return manifest

    async def list_api_versions(self) -> tuple[str, ...]:
        """Return no version: the processes of a job are started together without a scheduler."""
        return ()

    async def list_queue_positions(self, namespace: str, queue_name: str) -> Mapping[str, int]:  # noqa: ARG002
        """Return no position: local mode has no queue."""
        return {}

    async def delete(self, target: ObjectRef, *, grace_seconds: int | None = None) -> None:
        """Stop the process of a pod. The file of a ConfigMap is kept for inspection."""
        pod = self._pods.get(target.name) if target.kind == "Pod" else None
        if pod is not None and pod.uid == target.uid:
            pod.stop(
                grace_seconds=pod.body["spec"]["terminationGracePeriodSeconds"]
                if grace_seconds is None
                else grace_seconds
            )

    async def emit_event(self, event: RawBody) -> None:
        """Print the event unless the job has ended, because the command prints the final result with local paths."""
        if not self._has_ended:
            self._on_event(datetime.fromisoformat(event["eventTime"]), event["reason"], event["note"])

    def find_status_url(self, attempt: int | None) -> str | None:
        """Return the status URL of node rank 0, or None if node 0 is not running."""
        for pod in self._pods.values():
            labels = pod.body["metadata"]["labels"]
            if labels[names.ATTEMPT] == str(attempt) and labels[names.NODE_RANK] == "0" and not pod.has_ended:
                return f"http://{LOOPBACK}:{self._ports[labels[names.ATTEMPT]][1]}/status"
        return None

    def force_stop(self, *, grace_seconds: int) -> None:
        """Stop all running pods with a shorter grace period."""
        for pod in list(self._pods.values()):
            if not pod.has_ended:
                pod.stop(grace_seconds=grace_seconds)

    async def close(self) -> None:
        """Kill all remaining processes and wait until they have ended."""
        pods = list(self._pods.values())
        for pod in pods:
            if not pod.has_ended:
                pod.kill()
        await asyncio.gather(*(pod.wait() for pod in pods))
        self._watchdog.close()

    def get_attempt_folder(self, attempt: str) -> Path:
        """Return the folder of an attempt, which contains the trainer's spec and one folder per node."""
        return self._store.folder / f"attempt-{attempt}"

    async def _create_pod(self, manifest: RawBody) -> str:
        """Start the process of a pod and return the uid of the pod."""
        name = manifest["metadata"]["name"]
        existing = self._pods.get(name)
        if existing is not None:
            if get_controller_uid(existing.body) != get_controller_uid(manifest):
                raise NameTaken(kind="Pod", name=name)
            return existing.uid
        pod = self._pods[name] = LocalPod(manifest, self._watchdog, on_change=self._on_pod_event)
        self._children.on_pod_event(None, pod.body)
        await pod.start(self._build_process_spec(manifest))
        return pod.uid

    def _build_process_spec(self, manifest: RawBody) -> NodeProcessSpec:
        labels = manifest["metadata"]["labels"]
        attempt, node_rank = labels[names.ATTEMPT], int(labels[names.NODE_RANK])
        folder = self.get_attempt_folder(attempt) / f"node-{node_rank}"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "run").mkdir(parents=True)
        if attempt not in self._ports:
            self._ports[attempt] = find_free_ports(1 + len(self._resources.gpus))
        master_port, *status_ports = self._ports[attempt]
        node_mounts = (
            LocalMount(names.OUTPUT_DIR, self._resources.output),
            LocalMount(names.CONFIG_DIR, folder.parent),
            LocalMount(names.RUN_DIR, folder / "run"),
            LocalMount(names.TERMINATION_LOG, folder / "termination.json"),
        )
        placement = NodePlacement(
            mounts=(*self._resources.volumes, *node_mounts),
            master_port=master_port,
            status_port=status_ports[node_rank],
            gpus=self._resources.gpus[node_rank],
            cpus=count_cpus_per_node(len(self._resources.gpus)),
        )
        environment = build_environment(manifest["spec"]["containers"][0], placement, self._resources.environment)
        if self._resources.hides_credential_files:
            environment |= hide_credential_files(os.environ, folder / "home")
        return NodeProcessSpec(
            command=self._resources.command,
            environment=environment,
            termination_log=folder / "termination.json",
            console_log=folder / "console.log",
            inherited_lock=self._store.lock,
        )

    def _write_config(self, manifest: RawBody) -> None:
        folder = self.get_attempt_folder(manifest["metadata"]["labels"][names.ATTEMPT])
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in manifest["data"].items():
            (folder / name).write_text(content, encoding="utf-8")

    def _on_pod_event(self, old_body: RawBody | None, new_body: RawBody | None) -> None:
        if old_body is not None and new_body is None:
            self._pods.pop(old_body["metadata"]["name"], None)
        self._children.on_pod_event(old_body, new_body)
