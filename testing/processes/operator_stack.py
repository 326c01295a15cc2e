"""Cluster with the operator installed by Helm, for the demo and the end-to-end tests."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from testing.cluster.images.project_images import ImageBuilder, get_image_name
from testing.cluster.kubectl_proxy import ApiUnavailable, KubectlProxy
from testing.cluster.provider import ClusterProvider, choose_provider
from testing.models import tiny_text

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts" / "finetune-operator"
FORGER = "forger"  # whom the policy for children permits what an attacker could do without the policy
EXAMPLE = REPOSITORY / "manifests" / "examples" / "cpu-two-nodes.yaml"
OPERATOR_NAMESPACE = "finetune-system"
NAMESPACE = "finetune-jobs"

RawBody = dict[str, Any]
JobPredicate = Callable[[RawBody], bool]

# script that prints the phase, process state and Python stack of each rank of a pod
_PRINT_RANKS = """
import os
from pathlib import Path
from finetune_supervisor.contract import RunFolder
from finetune_supervisor.liveness.heartbeat import read_heartbeats
from finetune_supervisor.liveness.stack_dump import inspect_ranks
run = RunFolder(Path(os.environ["FINETUNE_RUN_DIR"]))
beats = read_heartbeats(run.heartbeats)
print(*inspect_ranks(run, beats, dict.fromkeys((beat.local_rank for beat in beats), 0.0)), sep="\\n")
"""


@dataclass
class OperatorInstallation:
    """A cluster with a namespace for jobs; `stages` contains the duration of each setup step in seconds."""

    provider: ClusterProvider
    namespace: str = NAMESPACE
    stages: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        started_at = time.monotonic()
        yield
        self.stages[title] = time.monotonic() - started_at

    def prepare(self) -> None:
        """Set up the cluster, images, operator and storage with a tiny model and dataset, reusing existing ones."""
        self.prepare_operator()
        with self.stage("model and dataset created"):
            self.prepare_namespace()
            self.prepare_storage()

    def prepare_operator(self) -> None:
        """Set up the cluster, images and operator, reusing existing ones."""
        with self.stage("cluster up"):
            self.provider.up()
        with self.stage("images built"):
            archives = [ImageBuilder(self.provider.cache).build(target) for target in ("operator", "trainer")]
        with self.stage("images loaded"):
            for archive in archives:
                self.provider.load_image(archive)
        with self.stage("operator installed"):
            self.install_operator()

    def install_operator(self) -> None:
        """Install the operator with Helm and the images of this checkout; pods with older images are replaced."""
        self.helm(
            *("upgrade", "--install", "finetune-operator", str(CHART), "--namespace", OPERATOR_NAMESPACE),
            *("--create-namespace", "--wait", "--timeout", "120s", *build_helm_options()),
            *(
                "--set-string",
                f"podAnnotations.image={ImageBuilder(self.provider.cache).compute_content_key('operator')}",
            ),
        )

    def helm(self, *arguments: str) -> str:
        command = [str(self.provider.helm), "--kubeconfig", str(self.provider.kubeconfig), *arguments]
        return run(command)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl in the namespace of the jobs."""
        command = [str(self.provider.kubectl), "--kubeconfig", str(self.provider.kubeconfig)]
        return run([*command, "--namespace", self.namespace, *arguments], stdin=stdin)

    def apply(self, *objects: Mapping[str, Any], user: str = "") -> None:
        options = (f"--as={user}", "--as-group=system:masters") if user else ()
        self.kubectl("apply", "--server-side", *options, "-f", "-", stdin=yaml.safe_dump_all(objects))

    def prepare_namespace(self) -> None:
        """Create the namespace with the enforced pod security level `restricted`."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace, "labels": labels}})

    def prepare_storage(self) -> None:
        """Create ReadWriteMany claims `datasets`, with a tiny model and dataset, and `models`."""
        for claim in ("datasets", "models"):
            self.apply(*self.provider.build_shared_claim_objects(self.namespace, claim))
        outputs = self.get_claim_folder("models") / self.namespace
        if not outputs.exists():
            outputs.mkdir()
            outputs.chmod(0o777)  # a test writes below it, which needs root if a pod creates it
        data = self.get_claim_folder("datasets")
        if not (data / "eval.jsonl").exists():
            tiny_text.build(data)
            run(["chmod", "-R", "a+rX", str(data)])

    def get_claim_folder(self, claim: str) -> Path:
        """Return the host folder of a claim."""
        return self.provider.get_shared_folder(self.namespace, claim)

    def get_output_folder(self, job: str) -> Path:
        """Return the host folder of a job's output."""
        return self.get_claim_folder("models") / self.namespace / job

    @cached_property
    def api(self) -> KubectlProxy:
        return KubectlProxy(self.provider.kubectl, self.provider.kubeconfig)

    def get_job(self, name: str) -> RawBody:
        return self.api.send("GET", f"/apis/finetune.dev/v1alpha1/namespaces/{self.namespace}/finetunejobs/{name}")

    def list_pods(self, name: str) -> list[RawBody]:
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=finetune.dev/job-name={name}"
        pods: list[RawBody] = self.api.send("GET", path)["items"]
        return pods

    def wait_until(
        self, name: str, predicate: JobPredicate, *, description: str, timeout_seconds: float = 180
    ) -> RawBody:
        """Poll the job until it satisfies the predicate, and return it; repeat requests that were not processed.

        Raises:
            TimeoutError: the job did not satisfy the predicate in time; the message contains a diagnosis of the job.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            with suppress(ApiUnavailable):
                job = self.get_job(name)
                if predicate(job):
                    return job
            time.sleep(0.1)
        raise TimeoutError(f"{name}: not {description} within {timeout_seconds:.0f} s\n{self.diagnose(name)}")

    def diagnose(self, name: str) -> str:
        """Return the output of `kubectl describe` for the job, and the log tail and rank states of each pod."""
        sections = [self.kubectl("describe", "ftj", name), self.kubectl("get", "pods", "-o", "wide")]
        for pod in (pod["metadata"]["name"] for pod in self.list_pods(name)):
            for arguments in (("logs", pod, "--tail=20"), ("exec", pod, "--", "python", "-c", _PRINT_RANKS)):
                try:
                    sections.append(f"{pod}:\n{self.kubectl(*arguments)}")
                except RuntimeError as error:  # kubectl exec fails if the container is not running
                    sections.append(f"{pod}: {error}")
        return "\n".join(sections)

    def wait_until_finished(self, name: str, *, timeout_seconds: float = 240) -> RawBody:
        return self.wait_until(
            name, lambda job: has_condition(job, "Finished"), description="finished", timeout_seconds=timeout_seconds
        )

    def delete(self, name: str) -> None:
        self.kubectl("delete", "ftj", name, "--ignore-not-found", "--wait=true", "--timeout=60s")


def run(command: list[str], *, stdin: str | None = None) -> str:
    """Run a program and return its standard output.

    Raises:
        RuntimeError: the exit code is not 0; the message contains the standard error.
    """
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        shell_command = " ".join(command)
        raise RuntimeError(f"`{shell_command}` ended with {result.returncode}: {result.stderr.strip()[-3000:]}")
    return result.stdout


def build_helm_options() -> tuple[str, ...]:
    """Return Helm options for the images of this checkout, which are not in a registry."""
    repository, _, tag = get_image_name("operator").rpartition(":")
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "image.pullPolicy": "Never",
        "trainerImage": get_image_name("trainer"),
    }
    options = tuple(word for key, value in values.items() for word in ("--set-string", f"{key}={value}"))
    return (*options, "--set-json", f"admissionPolicies.children={json.dumps({'accounts': [FORGER]})}")


def has_condition(job: RawBody, condition_type: str) -> bool:
    """Return whether the job's condition of the given type is True."""
    conditions = job.get("status", {}).get("conditions", [])
    return any(c["type"] == condition_type and c["status"] == "True" for c in conditions)


def get_reported_step(job: RawBody) -> int:
    """Return the step in the job's status, or 0 before the first step."""
    step: int = (job.get("status", {}).get("progress") or {}).get("step", 0)
    return step


def build_example_job(name: str, **fields: Any) -> RawBody:
    """Return the CPU example job with this name and these spec fields; a field that is None is removed."""
    body: RawBody = yaml.safe_load(EXAMPLE.read_text())
    body["metadata"]["name"] = name
    spec = {**body["spec"], "imagePullPolicy": "Never", **fields}
    body["spec"] = {field: value for field, value in spec.items() if value is not None}
    return body


def main() -> None:
    """Install the operator of this checkout, as `make cluster-install` does."""
    choice = choose_provider(os.environ)
    if choice.provider is None:
        raise SystemExit(f"no cluster: {choice.explanation}")
    OperatorInstallation(choice.provider).prepare_operator()
    print(f"the operator runs: export KUBECONFIG={choice.provider.kubeconfig}")


if __name__ == "__main__":
    main()
