"""Invariants of attempts that operators of several releases start: no mixed gangs, recorded image and defaults."""

from typing import Any

from finetune_api.v1alpha1.reasons import Reason
from finetune_operator import names
from finetune_operator.observation.ownership import get_controller_uid
from testing.simulator.world.apiserver import Change, RawBody
from testing.simulator.world.world import World

RANK_VARIABLES = ("NODE_RANK", "PET_NODE_RANK")  # variables that differ between the nodes of an attempt
NEXT_RELEASE_FIELD = "releaseNote"  # field of the status that only the next release knows


class AttemptMonitor:
    """Compares the pods of each attempt with each other, and each attempt with the first one of its job."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._removed: set[tuple[str, str]] = set()  # (job uid, attempt) of which somebody deleted or relabelled a pod
        self._gangs: dict[tuple[str, str], Any] = {}  # (job uid, attempt) -> properties of its pods
        self._images: dict[str, str] = {}  # job uid -> image of the first pod, if the spec names none
        self._defaults: dict[str, str | None] = {}  # job uid -> recorded defaults of the first ConfigMap
        world.server.listeners.append(self._on_commit)

    def _on_commit(self, change: Change) -> None:
        if change.kind == "Pod" and not change.actor.startswith("operator"):
            self._record_removal(change)
        if not change.actor.startswith("operator") or change.new_body is None:
            return
        if change.old_body is None and change.kind == "Pod":
            self._check_pod(change.new_body)
        elif change.old_body is None and change.kind == "ConfigMap":
            self._check_defaults(change.new_body)
        elif change.old_body is not None and change.kind == names.FINETUNEJOB_KIND:
            self._check_status(change.old_body.get("status") or {}, change.new_body)

    def _record_removal(self, change: Change) -> None:
        metadata, old_metadata = change.body["metadata"], (change.old_body or change.body)["metadata"]
        has_other_labels = metadata.get("labels") != old_metadata.get("labels")
        if change.new_body is None or "deletionTimestamp" in metadata or has_other_labels:
            attempt = old_metadata.get("labels", {}).get(names.ATTEMPT, "")
            self._removed.add((get_controller_uid(change.body) or "", attempt))

    def _check_pod(self, pod: RawBody) -> None:
        uid, attempt = get_controller_uid(pod) or "", pod["metadata"]["labels"][names.ATTEMPT]
        container = pod["spec"]["containers"][0]
        variables = [v for v in container["env"] if v["name"] not in RANK_VARIABLES]
        config_maps = [v["configMap"]["name"] for v in pod["spec"]["volumes"] if "configMap" in v]
        gang = container["image"], container.get("resources"), variables, config_maps, pod["spec"]["volumes"]
        name = pod["metadata"]["name"]
        if self._gangs.setdefault((uid, attempt), gang) != gang:
            self._world.report(f"{name} differs from the other pods of its attempt: {gang}")
        job = next((job for job in self._world.jobs if job.uid == uid), None)
        if job is None or (job.body or {}).get("spec", {}).get("image"):
            self._images.pop(uid, None)
        elif self._images.setdefault(uid, container["image"]) != container["image"]:
            self._world.report(f"{name} has image {container['image']}, but its job began with {self._images[uid]}")

    def _check_defaults(self, config_map: RawBody) -> None:
        uid, defaults = get_controller_uid(config_map) or "", config_map["data"].get(names.DEFAULTS_KEY)
        if self._defaults.setdefault(uid, defaults) != defaults:
            self._world.report(f"{config_map['metadata']['name']} has other defaults than its job began with")

    def _check_status(self, old_status: RawBody, job: RawBody) -> None:
        status, uid = job["status"], job["metadata"]["uid"]
        name = job["metadata"]["name"]
        if NEXT_RELEASE_FIELD in old_status and NEXT_RELEASE_FIELD not in status:
            self._world.report(f"the status of {name} lost the field {NEXT_RELEASE_FIELD} of the next release")
        known = {record["attempt"]: record.get("reason") for record in old_status.get("attempts", ())}
        for record in status.get("attempts", ()):
            number, reason = record["attempt"], record.get("reason")
            if reason == Reason.POD_DELETED != known.get(number) and (uid, str(number)) not in self._removed:
                self._world.report(f"attempt {number} of {name} failed with {reason}, but no pod of it was deleted")
        self._check_progress(job)

    def _check_progress(self, job: RawBody) -> None:
        status, uid, name = job["status"], job["metadata"]["uid"], job["metadata"]["name"]
        step, reached_step = (status.get("progress") or {}).get("step") or 0, self._world.trainer.reached_steps[uid]
        if step > reached_step and uid not in self._world.poisoned_uids:
            self._world.report(f"the status of {name} reports step {step}, but no process passed step {reached_step}")
