"""A Cluster that is this machine: pods are processes, a ConfigMap is a file, a Service is nothing."""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_cli.local.environment import LOOPBACK, Place, find_ports, local_environment
from finetune_cli.local.parent_watchdog import Guard
from finetune_cli.local.pod import LocalPod, Program
from finetune_cli.local.state_store import Record
from finetune_cli.local.volume_mapping import Mount
from finetune_operator import names
from finetune_operator.controller.child_cache import Children
from finetune_operator.kube.cluster import NameTaken, ObjectRef
from finetune_operator.observation.pods import controller

Raw = dict[str, Any]

SUPERVISOR = (sys.executable, "-m", "finetune_supervisor")


@dataclass(frozen=True)
class Machine:
    """What of this machine the nodes of a job get."""

    output: Path
    volumes: tuple[Mount, ...]
    gpus: tuple[tuple[str, ...], ...]  # by node rank
    command: tuple[str, ...] = SUPERVISOR


class LocalCluster:
    """What reconcile asks for, done with processes."""

    def __init__(
        self, machine: Machine, record: Record, children: Children, *, on_event: Callable[[Raw], None]
    ) -> None:
        self._machine = machine
        self._record = record
        self._children = children
        self._on_event = on_event
        self._pods: dict[str, LocalPod] = {}
        self._ports: dict[str, list[int]] = {}
        self._guard = Guard()
        self._finished = False

    async def write_status(self, job: Raw, status: Raw) -> Raw:
        """Keep it in the file beside the output."""
        self._record.write_status(status)
        self._finished = "completionTime" in status
        return {**job, "status": status}

    async def list_pods(self, namespace: str, job_uid: str) -> tuple[Raw, ...]:
        """Nobody else makes pods here, so this is never stale."""
        metadata = ((pod.body, pod.body["metadata"]) for pod in self._pods.values())
        return tuple(
            body
            for body, said in metadata
            if (said["namespace"], said["labels"][names.JOB_UID]) == (namespace, job_uid)
        )

    async def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        """Every claim is a folder that all local nodes share; of pods, the list is all there is."""
        if kind == "Pod":
            return None
        return {"metadata": {"name": name, "namespace": namespace}, "spec": {"accessModes": ["ReadWriteMany"]}}

    async def create(self, manifest: Raw) -> None:
        """Start the process, write the file, or only remember the name."""
        match manifest["kind"]:
            case "Pod":
                await self._create_pod(manifest)
            case "ConfigMap":
                self._write_config(manifest)
            case "Service":
                uid = f"service-{manifest['metadata']['name']}"
                self._children.service_changed(None, {**manifest, "metadata": {**manifest["metadata"], "uid": uid}})
            case kind:
                raise AssertionError(f"local mode knows no {kind}")

    async def delete(self, target: ObjectRef, *, grace_seconds: int | None = None) -> None:
        """Files of an attempt stay: they are small, and people read them."""
        pod = self._pods.get(target.name) if target.kind == "Pod" else None
        if pod is not None and pod.uid == target.uid:
            pod.stop(
                grace_seconds=pod.body["spec"]["terminationGracePeriodSeconds"]
                if grace_seconds is None
                else grace_seconds
            )

    async def emit_event(self, event: Raw) -> None:
        """People are sitting in front of it; the end is told them with the folders of this machine."""
        if not self._finished:
            self._on_event(event)

    def status_address(self, attempt: int | None) -> str | None:
        """Where node rank 0 of an attempt answers, if it runs."""
        for pod in self._pods.values():
            labels = pod.body["metadata"]["labels"]
            if labels[names.ATTEMPT] == str(attempt) and labels[names.NODE_RANK] == "0" and not pod.ended:
                return f"http://{LOOPBACK}:{self._ports[labels[names.ATTEMPT]][1]}/status"
        return None

    def hurry(self, *, grace_seconds: int) -> None:
        """Shorten the grace of whatever still runs."""
        for pod in list(self._pods.values()):
            if not pod.ended:
                pod.stop(grace_seconds=grace_seconds)

    async def close(self) -> None:
        """Leave no process behind."""
        pods = list(self._pods.values())
        for pod in pods:
            if not pod.ended:
                pod.kill()
        await asyncio.gather(*(pod.wait() for pod in pods))
        self._guard.close()

    def attempt_folder(self, attempt: str) -> Path:
        """Files of one attempt: the spec as the trainer gets it, and a folder for each node."""
        return self._record.folder / f"attempt-{attempt}"

    async def _create_pod(self, manifest: Raw) -> None:
        name = manifest["metadata"]["name"]
        there = self._pods.get(name)
        if there is not None:
            if controller(there.body) != controller(manifest):
                raise NameTaken(kind="Pod", name=name)
            return
        pod = self._pods[name] = LocalPod(manifest, self._guard, on_change=self._pod_changed)
        self._children.pod_changed(None, pod.body)
        await pod.start(self._program(manifest))

    def _program(self, manifest: Raw) -> Program:
        labels = manifest["metadata"]["labels"]
        attempt, node_rank = labels[names.ATTEMPT], int(labels[names.NODE_RANK])
        folder = self.attempt_folder(attempt) / f"node-{node_rank}"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "run").mkdir(parents=True)
        if attempt not in self._ports:
            self._ports[attempt] = find_ports(1 + len(self._machine.gpus))
        master_port, *status_ports = self._ports[attempt]
        own = (
            Mount(names.OUTPUT_DIR, self._machine.output),
            Mount(names.CONFIG_DIR, folder.parent),
            Mount(names.RUN_DIR, folder / "run"),
            Mount(names.TERMINATION_LOG, folder / "termination.json"),
        )
        place = Place(
            mounts=(*self._machine.volumes, *own),
            master_port=master_port,
            status_port=status_ports[node_rank],
            gpus=self._machine.gpus[node_rank],
        )
        return Program(
            command=self._machine.command,
            environment=local_environment(manifest["spec"]["containers"][0], place, os.environ),
            termination_log=folder / "termination.json",
            console_log=folder / "console.log",
            kept_open=self._record.lock,
        )

    def _write_config(self, manifest: Raw) -> None:
        folder = self.attempt_folder(manifest["metadata"]["labels"][names.ATTEMPT])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names.CONFIG_KEY).write_text(manifest["data"][names.CONFIG_KEY], encoding="utf-8")

    def _pod_changed(self, before: Raw | None, after: Raw | None) -> None:
        if before is not None and after is None:
            self._pods.pop(before["metadata"]["name"], None)
        self._children.pod_changed(before, after)
