"""A real cluster with the operator installed by Helm: where the demo and the end-to-end tests begin."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from testing.cluster.images.project_images import ImageBuilder, image_name
from testing.cluster.provider import Provider
from testing.models import tiny_text as tiny

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts" / "finetune-operator"
EXAMPLE = REPOSITORY / "manifests" / "examples" / "cpu-two-nodes.yaml"
OPERATOR_NAMESPACE = "finetune-system"

Raw = dict[str, Any]

# In a pod: each rank's phase, state in the kernel and stack.
_STACKS = """
import os
from pathlib import Path
from finetune_supervisor.contract import RunFolder
from finetune_supervisor.liveness.heartbeat import read_heartbeats
from finetune_supervisor.liveness.stack_dump import examine
run = RunFolder(Path(os.environ["FINETUNE_RUN_DIR"]))
beats = read_heartbeats(run.heartbeats)
print(*examine(run, beats, dict.fromkeys((beat.local_rank for beat in beats), 0.0)), sep="\\n")
"""


@dataclass
class Stack:
    """One cluster, one namespace for jobs. `stages` says how long each step of setting up took."""

    provider: Provider
    namespace: str = "finetune-jobs"
    stages: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.stages[title] = time.monotonic() - began

    def prepare(self) -> None:
        """Cluster, images, operator, storage with a tiny model and rows; what is there already is kept."""
        with self.stage("cluster up"):
            self.provider.up()
        with self.stage("images built"):
            archives = [ImageBuilder(self.provider.cache).build(target) for target in ("operator", "trainer")]
        with self.stage("images loaded"):
            for archive in archives:
                self.provider.load_image(archive)
        with self.stage("operator installed"):
            self.install_operator()
        with self.stage("model and rows made"):
            self.prepare_namespace()
            self.prepare_storage()

    def install_operator(self) -> None:
        """By Helm, as a user would, with the images of this checkout; pods of an older image are replaced."""
        self.helm(
            *("upgrade", "--install", "finetune-operator", str(CHART), "--namespace", OPERATOR_NAMESPACE),
            *("--create-namespace", "--wait", "--timeout", "120s", *helm_values()),
            *("--set-string", f"podAnnotations.image={ImageBuilder(self.provider.cache).content_key('operator')}"),
        )

    def helm(self, *arguments: str) -> str:
        command = [str(self.provider.helm), "--kubeconfig", str(self.provider.kubeconfig), *arguments]
        return run(command)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """kubectl in the jobs' namespace."""
        command = [str(self.provider.kubectl), "--kubeconfig", str(self.provider.kubeconfig)]
        return run([*command, "--namespace", self.namespace, *arguments], stdin=stdin)

    def apply(self, *objects: Mapping[str, Any]) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def prepare_namespace(self) -> None:
        """Pods of jobs must pass the restricted level, and here nothing else is let in."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace, "labels": labels}})

    def prepare_storage(self) -> None:
        """Claims `datasets` (with a tiny model and rows) and `models`, both for many nodes."""
        for claim in ("datasets", "models"):
            self.apply(*self.provider.shared_claim(self.namespace, claim))
        data = self.folder("datasets")
        if not (data / "eval.jsonl").exists():
            tiny.build(data)
            run(["chmod", "-R", "a+rX", str(data)])

    def folder(self, claim: str) -> Path:
        """The claim's content on this machine."""
        return self.provider.shared_folder(self.namespace, claim)

    def output(self, job: str) -> Path:
        """The output folder of a job on this machine."""
        return self.folder("models") / self.namespace / job

    def job(self, name: str) -> Raw:
        found: Raw = json.loads(self.kubectl("get", "ftj", name, "-o", "json"))
        return found

    def pods(self, name: str) -> list[Raw]:
        listed = self.kubectl("get", "pods", "-l", f"finetune.dev/job-name={name}", "-o", "json")
        pods: list[Raw] = json.loads(listed)["items"]
        return pods

    def wait(self, name: str, holds: Callable[[Raw], bool], *, what: str, timeout_seconds: float = 180) -> Raw:
        """The job as soon as `holds`; TimeoutError shows what it was instead."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            job = self.job(name)
            if holds(job):
                return job
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: not {what} within {timeout_seconds:.0f} s\n{self.examine(name)}")
            time.sleep(0.3)

    def examine(self, name: str) -> str:
        """The job in words, and of each of its pods the last lines and where its ranks stand."""
        shown = [self.kubectl("describe", "ftj", name), self.kubectl("get", "pods", "-o", "wide")]
        for pod in (pod["metadata"]["name"] for pod in self.pods(name)):
            for look in (("logs", pod, "--tail=20"), ("exec", pod, "--", "python", "-c", _STACKS)):
                try:
                    shown.append(f"{pod}:\n{self.kubectl(*look)}")
                except RuntimeError as error:  # it has not begun, or is over
                    shown.append(f"{pod}: {error}")
        return "\n".join(shown)

    def wait_finished(self, name: str, *, timeout_seconds: float = 240) -> Raw:
        return self.wait(name, lambda job: condition(job, "Finished"), what="finished", timeout_seconds=timeout_seconds)

    def delete(self, name: str) -> None:
        self.kubectl("delete", "ftj", name, "--ignore-not-found", "--wait=true", "--timeout=60s")


def run(command: list[str], *, stdin: str | None = None) -> str:
    """Standard output; an error shows what the program said."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shown = " ".join(command)
        raise RuntimeError(f"`{shown}` ended with {done.returncode}: {done.stderr.strip()[-3000:]}")
    return done.stdout


def helm_values() -> tuple[str, ...]:
    """Images of this checkout, which no registry has."""
    repository, _, tag = image_name("operator").rpartition(":")
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "image.pullPolicy": "Never",
        "trainerImage": image_name("trainer"),
    }
    return tuple(word for key, value in values.items() for word in ("--set-string", f"{key}={value}"))


def condition(job: Raw, kind: str) -> bool:
    """Whether the job's condition of that type is True."""
    conditions = job.get("status", {}).get("conditions", [])
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def step_of(job: Raw) -> int:
    """The last step the job's status tells."""
    step: int = (job.get("status", {}).get("progress") or {}).get("step", 0)
    return step


def example_job(name: str, **fields: Any) -> Raw:
    """The CPU example under another name, with fields of its spec replaced; None removes one."""
    body: Raw = yaml.safe_load(EXAMPLE.read_text())
    body["metadata"]["name"] = name
    wanted = {**body["spec"], "imagePullPolicy": "Never", **fields}
    body["spec"] = {field: value for field, value in wanted.items() if value is not None}
    return body
