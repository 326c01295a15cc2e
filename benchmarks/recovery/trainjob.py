"""The same loop as a TrainJob of Kubeflow, whose attempts are followed by its pods and what rank 0 says."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from testing.cluster.images.project_images import image_name
from testing.processes.operator_stack import Stack

RUNTIME = "recovery"
NODES = 2
PATIENCE_SECONDS = 120
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
RESTART = "jobset.sigs.k8s.io/restart-attempt"
_POD = r'{.metadata.labels.batch\.kubernetes\.io/job-completion-index} {.metadata.name} {.status.phase}{"\n"}'
_SAID = re.compile(r"(imported|joined|step \d+) at ([\d.]+)")

Raw = dict[str, Any]


@dataclass(frozen=True)
class Pods:
    """Of one attempt: names by node, and when all of them were there, and ran."""

    names: dict[int, str]
    made: float
    running: float


@dataclass(frozen=True)
class TrainJob:
    stack: Stack
    name: str

    def apply(self) -> None:
        spec = {"runtimeRef": {"name": RUNTIME, "kind": "TrainingRuntime"}, "trainer": {"numNodes": NODES}}
        self.stack.apply(make("TrainJob", self.name, spec))

    def remove(self) -> None:
        """With its pods."""
        self.stack.kubectl("delete", "trainjob", self.name, "--ignore-not-found")
        selector = f"{JOBSET_NAME}={self.name}"
        self.stack.kubectl("wait", "pod", "-l", selector, "--for=delete", f"--timeout={PATIENCE_SECONDS}s")

    def wait_for_pods(self, *, attempt: int) -> Pods:
        """Raises TimeoutError."""
        selector = f"{JOBSET_NAME}={self.name},{RESTART}={attempt}"
        seen: dict[int, tuple[str, str]] = {}
        made = 0.0
        with self.told("get", "pods", "-l", selector, "--watch", "-o", f"jsonpath={_POD}") as lines:
            for line in lines:
                rank, name, phase = line.rstrip("\n").split(" ")
                seen[int(rank)] = (name, phase)
                if len(seen) == NODES:
                    made = made or time.time()
                    if all(phase == "Running" for _, phase in seen.values()):
                        return Pods({rank: name for rank, (name, _) in seen.items()}, made, time.time())
        raise TimeoutError(f"TrainJob {self.name}: attempt {attempt} does not run; pods by node: {seen}")

    def wait_for_step(self, pod: str, step: int) -> dict[str, float]:
        """When its ranks came to each stage until then, of several the last. Raises TimeoutError."""
        said: dict[str, float] = {}
        with self.told("logs", "--follow", pod) as lines:
            for line in lines:
                if found := _SAID.fullmatch(line.strip()):
                    said[found[1]] = float(found[2])
                    if found[1] == f"step {step}":
                        return said
        raise TimeoutError(f"TrainJob {self.name}: pod {pod} did not come to step {step}; it said {said}")

    @contextmanager
    def told(self, *arguments: str) -> Iterator[IO[str]]:
        """Lines of a kubectl that goes on, but not for ever."""
        provider = self.stack.provider
        command = [str(provider.kubectl), f"--kubeconfig={provider.kubeconfig}", f"--namespace={self.stack.namespace}"]
        limited = ["timeout", str(PATIENCE_SECONDS), *command, *arguments]
        with subprocess.Popen(limited, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process.stdout  # type: ignore[misc]
            finally:
                process.terminate()


def make_runtime(*, program: list[str], folder: str) -> Raw:
    """Of what runs in `folder` of the claim `datasets`: all nodes begin anew when one fails, at most three times."""
    container = {
        "name": "node",
        "image": image_name("trainer"),
        "imagePullPolicy": "Never",
        "command": program,
        "workingDir": folder,
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "FINETUNE_OUTPUT", "value": "/tmp"}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "3Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    }
    pod = {
        "restartPolicy": "Never",
        "securityContext": {"runAsUser": 1000, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "datasets"}}],
    }
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": {"spec": pod}},
        },
    }
    spec = {
        "mlPolicy": {"numNodes": NODES, "torch": {"numProcPerNode": 2}},
        "template": {"spec": {"failurePolicy": {"maxRestarts": 3}, "replicatedJobs": [node]}},
    }
    return make("TrainingRuntime", RUNTIME, spec)


def make(kind: str, name: str, spec: Raw) -> Raw:
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
