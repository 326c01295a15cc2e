"""One job of a simulated cluster: its object, pods and processes, and the changes that users make to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune_operator import names
from finetune_operator.observation.ownership import get_controller_uid
from testing.simulator.world.apiserver import ObjectKey, RawBody
from testing.simulator.world.kubernetes_nodes import STRANGERS_SCHEDULER, KubernetesNode
from testing.simulator.world.parsed_objects import parse_status
from testing.simulator.world.trainer import TrainerProcess

if TYPE_CHECKING:
    from testing.simulator.world.world import World


class SimulatedJob:
    """A job of this name, including its deleted predecessors of the same name."""

    def __init__(self, world: World, key: ObjectKey, spec: RawBody) -> None:
        self.world = world
        self.key = key
        self.uids: list[str] = []  # uids of all jobs with this name, oldest first
        self.create(spec)

    def __str__(self) -> str:
        return f"{self.key.namespace}/{self.key.name}"

    @property
    def uid(self) -> str:
        """Uid of the current job, or of the last one if it was deleted."""
        return self.uids[-1]

    @property
    def body(self) -> RawBody | None:
        """Body of the job in the API server, or None."""
        return self.world.server.get(self.key)

    @property
    def status(self) -> RawBody:
        """Status of the job; empty if the job or its status does not exist."""
        status: RawBody = (self.body or {}).get("status") or {}
        return status

    @property
    def creation_time(self) -> str:
        """Time at which the current job was created; empty if it was deleted."""
        return str((self.body or {"metadata": {}})["metadata"].get("creationTimestamp", ""))

    @property
    def service_key(self) -> ObjectKey:
        """Key of the Service of the job."""
        return ObjectKey("Service", self.key.namespace, names.service_name(self.key.name))

    def get_config_map_key(self) -> ObjectKey:
        """Return the key of the ConfigMap of the current attempt."""
        name = names.config_map_name(self.key.name, self.uid, self.status.get("attempt") or 0)
        return ObjectKey("ConfigMap", self.key.namespace, name)

    def list_pods(self) -> list[tuple[ObjectKey, RawBody]]:
        """Return the pods of the current job, including terminating ones."""
        return [(key, pod) for key, pod in self.list_pods_of_all_uids() if get_controller_uid(pod) == self.uid]

    def list_pods_of_all_uids(self) -> list[tuple[ObjectKey, RawBody]]:
        """Return the pods of the current job and of its deleted predecessors, without forged ones."""
        return [
            (key, pod)
            for key, pod in self.world.list_all_pods()
            if get_controller_uid(pod) in self.uids and pod["spec"].get("schedulerName") != STRANGERS_SCHEDULER
        ]

    def has_orphaned_pods(self) -> bool:
        """Return whether a pod without owner looks like one of a deleted job of this name."""
        for key, pod in self.world.list_all_pods():
            labels = pod["metadata"]["labels"]
            is_of_this_name = (key.namespace, labels.get(names.JOB_NAME)) == (self.key.namespace, self.key.name)
            if is_of_this_name and labels.get(names.JOB_UID) != self.uid and get_controller_uid(pod) is None:
                return True
        return False

    def list_running_processes(self) -> list[TrainerProcess]:
        """Return all running trainer processes, including those unknown to the API server."""
        return [process for process in self.world.list_running_processes() if process.job_uid in self.uids]

    def create(self, spec: RawBody) -> None:
        """Create the job as a user."""
        manifest = {
            "apiVersion": names.API_VERSION,
            "kind": names.FINETUNEJOB_KIND,
            "metadata": {"name": self.key.name, "namespace": self.key.namespace},
            "spec": spec,
        }
        self.uids.append(self.world.server.create(manifest, actor="user")["metadata"]["uid"])

    def edit_spec(self, **fields: Any) -> None:
        """Change fields of the spec as a user."""
        if (body := self.body) is not None:
            metadata = {**body["metadata"], "generation": body["metadata"]["generation"] + 1}
            self.world.server.replace_fields(self.key, actor="user", metadata=metadata, spec={**body["spec"], **fields})

    def edit_annotation(self) -> None:
        """Change an annotation as a user, so that earlier resource versions are outdated."""
        if (body := self.body) is not None:
            metadata = {**body["metadata"], "annotations": {"touched": str(self.world.time)}}
            self.world.server.replace_fields(self.key, actor="user", metadata=metadata)

    def pick_pod(self) -> tuple[ObjectKey, RawBody] | None:
        """Return a random pod of the job."""
        pods = self.list_pods()
        return self.world.choices.pick(pods) if pods else None

    def pick_process(self) -> TrainerProcess | None:
        """Return a random running trainer process."""
        running = self.list_running_processes()
        return self.world.choices.pick(running) if running else None

    def pick_k8s_node(self) -> KubernetesNode:
        """Return a random Kubernetes node that has a pod of the job, or any node if none has."""
        k8s_nodes = self.world.k8s_nodes
        used = [k8s_node for _, pod in self.list_pods() if (k8s_node := k8s_nodes.find_k8s_node(pod))]
        return self.world.choices.pick(used or k8s_nodes.nodes)

    def lacks_k8s_nodes(self) -> bool:
        """Return whether fewer Kubernetes nodes are usable (healthy, free and not avoided) than the job needs."""
        avoided = parse_status(self.body).attempts[-1].avoids if self.body and self.status.get("attempts") else ()
        usable = [
            node
            for node in self.world.k8s_nodes.nodes
            if node.connected.is_set() and node.is_schedulable and node.name not in avoided
        ]
        required: int = self.body["spec"]["numNodes"] if self.body else 0
        return len(usable) < required

    def is_finished(self) -> bool:
        """Return whether the job is Complete, Failed, suspended as requested, or deleted."""
        if (body := self.body) is None:
            return True
        if body["metadata"].get("deletionTimestamp"):
            return all(self.world.is_lost(pod) for _, pod in self.list_pods())  # pods on lost nodes remain forever
        if "completionTime" in self.status:
            return True
        return bool(body["spec"].get("suspend")) and self.get_condition_status("Suspended") == "True"

    def get_condition_status(self, condition_type: str) -> str | None:
        """Return the status of a condition of the job, or None if the condition is absent."""
        return self._get_condition(condition_type).get("status")

    def get_condition_reason(self, condition_type: str) -> str | None:
        """Return the reason of a condition of the job, or None if the condition is absent."""
        return self._get_condition(condition_type).get("reason")

    def _get_condition(self, condition_type: str) -> RawBody:
        return next((c for c in self.status.get("conditions", ()) if c["type"] == condition_type), {})
