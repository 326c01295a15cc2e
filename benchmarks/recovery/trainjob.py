"""Runs the DDP loop as a Kubeflow TrainJob and observes its attempts through their pods and the log of rank 0."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from benchmarks.kubeflow.objects import (
    JOBSET_NAME_LABEL,
    RESTART_ATTEMPT_LABEL,
    RawBody,
    build_train_job,
    build_training_runtime,
)
from testing.cluster.images.project_images import get_image_name
from testing.processes.operator_stack import OperatorInstallation

RUNTIME_NAME = "recovery"
NODES = 2
PROCESSES_PER_NODE = 2
TIMEOUT_SECONDS = 120
_POD_TEMPLATE = r'{.metadata.labels.batch\.kubernetes\.io/job-completion-index} {.metadata.name} {.status.phase}{"\n"}'
_STAGE_LINE = re.compile(r"(imported|joined|step \d+) at ([\d.]+)")


@dataclass(frozen=True)
class AttemptPods:
    """Pods of one attempt, and the Unix times at which all of them were created and running."""

    names: dict[int, str]
    created_at: float
    running_at: float


@dataclass(frozen=True)
class TrainJob:
    installation: OperatorInstallation
    name: str

    def apply(self) -> None:
        self.installation.apply(
            build_train_job(self.name, runtime=RUNTIME_NAME, nodes=NODES, processes_per_node=PROCESSES_PER_NODE)
        )

    def delete(self) -> None:
        """Delete the job and wait until its pods are deleted."""
        self.installation.kubectl("delete", "trainjob", self.name, "--ignore-not-found")
        selector = f"{JOBSET_NAME_LABEL}={self.name}"
        self.installation.kubectl("wait", "pod", "-l", selector, "--for=delete", f"--timeout={TIMEOUT_SECONDS}s")

    def wait_for_pods(self, *, attempt: int) -> AttemptPods:
        """Wait until all pods of the attempt run.

        Raises: TimeoutError
        """
        selector = f"{JOBSET_NAME_LABEL}={self.name},{RESTART_ATTEMPT_LABEL}={attempt}"
        pods: dict[int, tuple[str, str]] = {}
        created_at = 0.0
        with self.stream_kubectl("get", "pods", "-l", selector, "--watch", "-o", f"jsonpath={_POD_TEMPLATE}") as lines:
            for line in lines:
                rank, name, phase = line.rstrip("\n").split(" ")
                pods[int(rank)] = (name, phase)
                if len(pods) == NODES:
                    created_at = created_at or time.time()
                    if all(phase == "Running" for _, phase in pods.values()):
                        return AttemptPods({rank: name for rank, (name, _) in pods.items()}, created_at, time.time())
        raise TimeoutError(f"TrainJob {self.name}: attempt {attempt} does not run; pods by node: {pods}")

    def wait_for_step(self, pod: str, step: int) -> dict[str, float]:
        """Wait until the pod has logged the step; return the time at which the last rank reached each stage.

        Raises: TimeoutError
        """
        stage_times: dict[str, float] = {}
        with self.stream_kubectl("logs", "--follow", pod) as lines:
            for line in lines:
                if match := _STAGE_LINE.fullmatch(line.strip()):
                    stage_times[match[1]] = float(match[2])
                    if match[1] == f"step {step}":
                        return stage_times
        raise TimeoutError(f"TrainJob {self.name}: pod {pod} did not reach step {step}; logged stages: {stage_times}")

    @contextmanager
    def stream_kubectl(self, *arguments: str) -> Iterator[IO[str]]:
        """Yield the output lines of a kubectl command, which runs until the block ends or the timeout expires."""
        provider = self.installation.provider
        command = [
            str(provider.kubectl),
            f"--kubeconfig={provider.kubeconfig}",
            f"--namespace={self.installation.namespace}",
        ]
        command_with_timeout = ["timeout", str(TIMEOUT_SECONDS), *command, *arguments]
        with subprocess.Popen(command_with_timeout, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process.stdout  # type: ignore[misc]
            finally:
                process.terminate()


def build_recovery_runtime(*, program: list[str], folder: str) -> RawBody:
    """Return a TrainingRuntime whose nodes run the program in `folder` of the claim `datasets`."""
    container = {
        "name": "node",
        "image": get_image_name("trainer"),
        "imagePullPolicy": "Never",
        "command": program,
        "workingDir": folder,
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "FINETUNE_OUTPUT", "value": "/tmp"}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "3Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    }
    pod_spec = {
        "securityContext": {"runAsUser": 1000, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "datasets"}}],
    }
    return build_training_runtime(RUNTIME_NAME, pod_spec)
