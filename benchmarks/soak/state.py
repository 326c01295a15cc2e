"""State of a soak test: jobs and pods as last observed, the causes of ended attempts, and violated invariants."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.load.job_bodies import JOBS_PATH, RawBody
from benchmarks.rig import NAMESPACE
from benchmarks.soak.scripts import DELETED, JobPlan
from finetune_api.v1alpha1.quantity import parse_quantity
from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.api_paths import collection_path
from finetune_operator.kube.informer import Informer
from finetune_operator.observation.ownership import find_controlling_owner, parse_time

RESTARTING_ACTIONS = ("Restart", "Repair", "Fail")  # actions of the operator after an attempt that failed
SUSPENSION = "the job is suspended"
NODE_LOSS = "a Kubernetes node is removed"

AttemptKey = tuple[str, int]  # uid of the job and number of the attempt
FinalState = tuple[str, str]  # phase and reason


class SoakState:
    """Jobs and pods as observed by informers, including final states of jobs that were deleted later.

    `problems` contains violated invariants. `causes` contains what the soak test did to each attempt; an attempt that
    failed without a cause was ended by a disturbance of the operator.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, RawBody] = {}  # newest job by name
        self.pods: dict[str, RawBody] = {}  # by name
        self.deleted_uids: set[str] = set()
        self.final_states: dict[str, FinalState] = {}  # by uid
        self.attempts: dict[AttemptKey, RawBody] = {}  # newest record of each attempt
        self.restarts: dict[str, int] = {}  # by uid
        self.causes: defaultdict[AttemptKey, list[str]] = defaultdict(list)
        self.failed_at: dict[AttemptKey, float] = {}  # monotonic time of the action that made an attempt fail
        self.running_at: dict[AttemptKey, float] = {}  # monotonic time at which all pods ran
        self.missing_nodes: set[str] = set()
        self.problems: list[str] = []
        self._names_by_uid: dict[str, str] = {}
        self._images: dict[str, str] = {}  # by uid of the job

    def build_informers(self, api: ApiClient) -> tuple[Informer, ...]:
        """Return the informers that keep the state up to date."""
        return (
            Informer(api, JOBS_PATH, selector="", on_change=self.on_job_event),
            Informer(api, collection_path("Pod", NAMESPACE), selector=names.JOB_UID, on_change=self.on_pod_event),
        )

    def get_uid(self, name: str) -> str:
        """Return the uid of the newest job of this name, or an empty string."""
        uid: str = self.jobs.get(name, {}).get("metadata", {}).get("uid", "")
        return uid

    def find_running_attempt(self, plan: JobPlan) -> AttemptKey | None:
        """Return the current attempt of the job if all its pods run, otherwise None."""
        attempt, uid = self.jobs.get(plan.name, {}).get("status", {}).get("attempt"), self.get_uid(plan.name)
        if attempt is None:
            return None
        pods = [self.pods.get(names.pod_name(plan.name, attempt, rank)) for rank in range(plan.nodes)]
        return (uid, attempt) if all(pod and is_running(pod) and get_job_uid(pod) == uid for pod in pods) else None

    def find_final_state(self, name: str) -> FinalState | None:
        """Return the phase and reason of the newest job if it has finished or was deleted, otherwise None."""
        uid = self.get_uid(name)
        return self.final_states.get(uid) or ((DELETED, "") if uid in self.deleted_uids else None)

    def has_condition(self, name: str, condition_type: str) -> bool:
        conditions = self.jobs.get(name, {}).get("status", {}).get("conditions", ())
        return any(c["type"] == condition_type and c["status"] == "True" for c in conditions)

    def add_cause(self, key: AttemptKey, cause: str) -> None:
        """Record what ends the attempt."""
        if cause not in self.causes[key]:
            self.causes[key].append(cause)

    def describe(self, key: AttemptKey) -> str:
        return f"{self._names_by_uid.get(key[0], key[0])} attempt {key[1]}"

    def list_unexplained_failures(self) -> list[str]:
        """Return the attempts that failed, or were stopped for a suspension, without a cause."""
        return [
            f"{self.describe(key)} ended without a cause: {record.get('reason')}, action {record.get('action')},"
            f" {record.get('message', '')[:200]}"
            for key, record in self.attempts.items()
            if (record.get("action") in RESTARTING_ACTIONS and not self.causes.get(key))
            or (record.get("action") == "Suspend" and SUSPENSION not in self.causes.get(key, ()))
        ]

    def list_wrong_restart_counts(self) -> list[str]:
        """Return the jobs that count more restarts than attempts that were made to fail."""
        causes_by_uid: defaultdict[str, int] = defaultdict(int)
        for (uid, _), causes in self.causes.items():
            causes_by_uid[uid] += any(cause != SUSPENSION for cause in causes)
        return [
            f"{self._names_by_uid[uid]} counts {count} restarts, but only {causes_by_uid[uid]} attempts were ended"
            for uid, count in self.restarts.items()
            if count > causes_by_uid[uid]
        ]

    def list_pods_of_node(self, node: str) -> list[RawBody]:
        return [pod for pod in self.pods.values() if pod["spec"].get("nodeName") == node]

    def on_job_event(self, old_job: RawBody | None, new_job: RawBody | None) -> None:
        """Handle a job event of an informer."""
        if new_job is None:
            assert old_job is not None
            self.deleted_uids.add(old_job["metadata"]["uid"])
            return
        name, uid, status = new_job["metadata"]["name"], new_job["metadata"]["uid"], new_job.get("status", {})
        self.jobs[name] = new_job
        self._names_by_uid[uid] = name
        self.restarts[uid] = status.get("restarts", 0)
        self.attempts.update({(uid, record["attempt"]): record for record in status.get("attempts", ())})
        reasons = {c["type"]: c["reason"] for c in status.get("conditions", ()) if c["status"] == "True"}
        final_state = next(((phase, reasons[phase]) for phase in ("Complete", "Failed") if phase in reasons), None)
        previous = self.final_states.get(uid)
        if previous is not None and final_state != previous:
            self.problems.append(f"{name} changed from {previous} to {final_state} after its end")
        if final_state is not None:
            self.final_states[uid] = final_state

    def on_pod_event(self, old_pod: RawBody | None, new_pod: RawBody | None) -> None:
        """Handle a pod event of an informer: check the pods of the job, and record when an attempt runs."""
        if new_pod is None:
            assert old_pod is not None
            if (
                self.pods.get(old_pod["metadata"]["name"], {}).get("metadata", {}).get("uid")
                == old_pod["metadata"]["uid"]
            ):
                del self.pods[old_pod["metadata"]["name"]]
            return
        self.pods[new_pod["metadata"]["name"]] = new_pod
        if find_controlling_owner(new_pod).get("kind") != names.FINETUNEJOB_KIND:
            return  # a pod of another tenant with the labels of a job
        if new_pod["spec"].get("nodeName") in self.missing_nodes:
            self.add_cause((get_job_uid(new_pod), get_attempt(new_pod)), NODE_LOSS)
        if old_pod is None:
            self._check_gang(new_pod)
        if is_running(new_pod):
            self._check_older_attempts(new_pod)
            self._record_running(new_pod)

    def _check_gang(self, pod: RawBody) -> None:
        """Check that the pods of an attempt have the same settings, and all attempts of a job the same image."""
        uid, image = get_job_uid(pod), pod["spec"]["containers"][0]["image"]
        if self._images.setdefault(uid, image) != image:
            self.problems.append(
                f"{pod['metadata']['name']} has the image {image}, its job began with {self._images[uid]}"
            )
        for peer in self._list_pods_of_job(uid):
            if get_attempt(peer) == get_attempt(pod) and get_shm_bytes(peer) != get_shm_bytes(pod):
                self.problems.append(f"{peer['metadata']['name']} and {pod['metadata']['name']} have different specs")

    def _check_older_attempts(self, pod: RawBody) -> None:
        for other in self._list_pods_of_job(get_job_uid(pod)):
            if get_attempt(other) < get_attempt(pod) and self._may_run(other):
                self.problems.append(f"{pod['metadata']['name']} runs beside {other['metadata']['name']}")

    def _may_run(self, pod: RawBody) -> bool:
        """Return whether the pod runs on an existing Kubernetes node and its grace period has not ended."""
        deadline = parse_time(pod["metadata"].get("deletionTimestamp"))
        is_overdue = deadline is not None and deadline.timestamp() < time.time()
        is_lost = pod["spec"].get("nodeName") in self.missing_nodes
        return pod.get("status", {}).get("phase") == "Running" and not is_overdue and not is_lost

    def _record_running(self, pod: RawBody) -> None:
        uid, attempt = get_job_uid(pod), get_attempt(pod)
        job = self.jobs.get(find_controlling_owner(pod)["name"], {})
        pods = [p for p in self._list_pods_of_job(uid) if get_attempt(p) == attempt and is_running(p)]
        if job.get("metadata", {}).get("uid") == uid and len(pods) == job["spec"].get("numNodes", 1):
            self.running_at.setdefault((uid, attempt), time.monotonic())

    def _list_pods_of_job(self, uid: str) -> Iterator[RawBody]:
        return (pod for pod in tuple(self.pods.values()) if get_job_uid(pod) == uid)


def is_running(pod: RawBody) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def get_job_uid(pod: RawBody) -> str:
    """Return the uid of the job that controls the pod, or an empty string."""
    uid: str = find_controlling_owner(pod).get("uid", "")
    return uid


def get_attempt(pod: RawBody) -> int:
    return int(pod["metadata"]["labels"][names.ATTEMPT])


def get_shm_bytes(pod: RawBody) -> int | None:
    """Return the size of /dev/shm, which the soak test edits while a job is suspended.

    The API server writes quantities in a form of its own: 393216000 becomes 393216k.
    """
    volumes = pod["spec"].get("volumes", ())
    sizes = (volume["emptyDir"].get("sizeLimit") for volume in volumes if volume["name"] == "shm")
    return next((int(parse_quantity(size)) for size in sizes if size is not None), None)
