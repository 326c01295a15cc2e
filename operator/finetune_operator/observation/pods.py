"""Raw pods -> Observation: what can be seen of a job's children, in words that decide and failure use."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from finetune_api.termination import Outcome, Termination, parse_termination
from finetune_api.v1alpha1.status import Evidence, Progress
from finetune_operator import names

Raw = dict[str, Any]

MESSAGE_CHARACTERS = 600  # of one node's evidence in status: a few lines, not a log
FENCED_AFTER_SECONDS = 30  # past its deletion deadline, on a node that the taint manager gave up
OVERDUE_SECONDS = 300  # past it anywhere: no kubelet is there, though a drain or a toleration hides who said so


class Life(StrEnum):
    """Where a pod is in its life."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"  # exit 0, whatever was said
    FAILED = "Failed"
    GONE = "Gone"


@dataclass(frozen=True)
class Waiting:
    """Why a pod does not start."""

    reason: str
    message: str
    image: str = "spec.image"  # who chose the image that is waited for


@dataclass(frozen=True)
class NodeObservation:
    """One pod, alive or remembered."""

    attempt: int
    node_rank: int
    pod_name: str
    uid: str
    life: Life
    deleting: bool
    deletion_deadline: datetime | None
    scheduled: bool
    waiting: Waiting | None
    evidence: Evidence
    termination: Termination | None
    started_at: datetime | None = None
    making_since: datetime | None = None  # it was given a machine, or its volumes and network
    ready_to_start: bool | None = None  # volumes and network are; None where the kubelet does not tell
    hidden: bool = False  # its labels were edited, so that no watch tells of it
    restarted: bool = False  # in place, by its kubelet: the image was edited, or a new kubelet counts otherwise
    outlived_since: datetime | None = None  # its trainer ended, and something that was injected runs on

    @property
    def k8s_node(self) -> str:
        return self.evidence.k8s_node

    @property
    def ended(self) -> bool:
        """No process of it runs any more."""
        return self.life in (Life.SUCCEEDED, Life.FAILED, Life.GONE)

    @property
    def succeeded(self) -> bool:
        """It ended well and says that the result was published: exit 0 alone proves nothing."""
        return self.evidence.exit_code == 0 and self.evidence.outcome == Outcome.SUCCEEDED

    @property
    def missed(self) -> bool:
        """It is gone, but nobody saw it end, nor even be deleted."""
        return self.life is Life.GONE and self.deletion_deadline is None and self.evidence.exit_code is None

    def being_made_for(self, now: datetime) -> timedelta | None:
        """How long its kubelet has neither started its container nor told why not; None where that is not so."""
        if self.life is not Life.PENDING or self.making_since is None or self.waiting is not None:
            return None
        return now - self.making_since

    def may_run(self, now: datetime) -> bool:
        """Whether a process of it may still run: not ended, and not given up together with its lost k8s node."""
        if self.ended:
            return False
        if self.deletion_deadline is None:
            return True
        given_up = self.evidence.disruption == "DeletionByTaintManager"
        patience = FENCED_AFTER_SECONDS if given_up else OVERDUE_SECONDS
        return (now - self.deletion_deadline).total_seconds() < patience


@dataclass(frozen=True)
class Refusal:
    """A create that the API server refused, or a name that another object has: for good (`taken`), or `leaving`."""

    kind: str
    name: str
    status: int
    message: str
    taken: bool = False
    leaving: bool = False


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim that the job mounts."""

    name: str
    access_modes: tuple[str, ...]


@dataclass(frozen=True)
class Observation:
    """What is seen of a job's children. `fresh`: the pods come from a quorum LIST made for this decision."""

    nodes: tuple[NodeObservation, ...] = ()
    service_exists: bool = False  # and gives the pods names
    edited_service: str = ""  # uid of one that does so no more
    progress: Progress | None = None
    unheard: str = ""  # host and port that do not tell it, though asked for long
    claims: tuple[Claim, ...] | None = None
    refusals: tuple[Refusal, ...] = ()
    fresh: bool = False

    def of_attempt(self, attempt: int) -> tuple[NodeObservation, ...]:
        """One observation per node rank; a live pod wins over a remembered one."""
        ranked: dict[int, NodeObservation] = {}
        for node in self.nodes:
            known = ranked.get(node.node_rank)
            if node.attempt == attempt and (known is None or known.life is Life.GONE):
                ranked[node.node_rank] = node
        return tuple(ranked[rank] for rank in sorted(ranked))

    def live(self) -> tuple[NodeObservation, ...]:
        """The pods that exist, of whatever attempt."""
        return tuple(node for node in self.nodes if node.life is not Life.GONE)


def observe_pods(pods: Iterable[Raw], gone: Iterable[Raw]) -> tuple[NodeObservation, ...]:
    """Live pods and tombstones; a pod that is in both is alive."""
    live = [observe_pod(pod, gone=False) for pod in pods]
    known = {node.uid for node in live if node}
    remembered = [observe_pod(pod, gone=True) for pod in gone if pod["metadata"].get("uid") not in known]
    return tuple(node for node in (*live, *remembered) if node)


def observe_pod(pod: Raw, *, gone: bool) -> NodeObservation | None:
    """One pod; None if it is no node of the job that controls it, which only a foreign hand can have made."""
    metadata, status, owner = pod["metadata"], pod.get("status") or {}, controlling_owner(pod)
    place = names.parse_pod_name(metadata["name"], owner.get("name", ""))
    if place is None:
        return None
    attempt, node_rank = place
    container = _container_status(status)
    terminated = _first_end(container)
    message = (terminated or {}).get("message")
    termination = parse_termination(message)
    deleted = metadata.get("deletionTimestamp")
    placed, ready = _condition(status, "PodScheduled"), _condition(status, "PodReadyToStartContainers")
    return NodeObservation(
        attempt=attempt,
        node_rank=node_rank,
        pod_name=metadata["name"],
        uid=metadata.get("uid", ""),
        life=_life(status, container, gone=gone),
        deleting=deleted is not None,
        deletion_deadline=parse_time(deleted),
        scheduled=bool((pod.get("spec") or {}).get("nodeName")),
        waiting=_waiting(status, container),
        evidence=_evidence(pod, terminated or {}, termination, node_rank=node_rank, gone=gone),
        termination=termination,
        started_at=parse_time(((container.get("state") or {}).get("running") or {}).get("startedAt")),
        making_since=_making_since(placed, ready),
        restarted=_is_restarted(status, container, terminated),
        hidden=not gone and not is_labelled(pod),
        outlived_since=_outlived_since(status, terminated),
        ready_to_start={"True": True, "False": False}.get(ready.get("status", "")),
    )


def controlling_owner(child: Raw) -> Raw:
    """The ownerReference of the object that controls this one; empty if none does."""
    owners = child["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})


def controller(child: Raw) -> str | None:
    """Uid of the object that controls this one."""
    return controlling_owner(child).get("uid")


def is_labelled(child: Raw) -> bool:
    """Whether the watches tell of it."""
    labels = child["metadata"].get("labels") or {}
    return bool(labels.get(names.JOB_UID) == controller(child))


def parse_time(text: str | None) -> datetime | None:
    """An API timestamp, or None for nothing."""
    return datetime.fromisoformat(text) if text else None


def _container_status(status: Raw) -> Raw:
    """Of the trainer's container; of one before it that failed, because then the trainer's never starts."""
    own: Raw = next((c for c in status.get("containerStatuses") or [] if c.get("name") == names.CONTAINER), {})
    if {"running", "terminated"} & (own.get("state") or {}).keys():
        return own
    before = status.get("initContainerStatuses") or []
    return next((c for c in before if ((c.get("state") or {}).get("terminated") or {}).get("exitCode")), own)


def _first_end(container: Raw) -> Raw | None:
    """How the trainer's container ended; one that runs again in the same pod is another process, of no gang."""
    ended: Raw | None = (container.get("state") or {}).get("terminated")
    again = container.get("restartCount") or 0
    return (container.get("lastState") or {}).get("terminated") if ended is None and again else ended


def _is_restarted(status: Raw, container: Raw, terminated: Raw | None) -> bool:
    """A kubelet that evicts and finds the container gone already tells its end as that of one before, too."""
    ended = status.get("phase") in ("Succeeded", "Failed")
    return terminated is not None and not ended and "terminated" not in (container.get("state") or {})


def _life(status: Raw, container: Raw, *, gone: bool) -> Life:
    """From the container's state, which is a second ahead of the pod's phase."""
    if gone:
        return Life.GONE
    state = container.get("state") or {}
    if "terminated" in state:
        return Life.SUCCEEDED if state["terminated"].get("exitCode") == 0 else Life.FAILED
    phase = status.get("phase", "Pending")
    if phase == "Succeeded" or phase == "Failed":
        return Life(phase)
    return Life.RUNNING if "running" in state else Life.PENDING


def _making_since(placed: Raw, ready: Raw) -> datetime | None:
    last = ready if ready.get("status") == "True" else placed
    return parse_time(last.get("lastTransitionTime")) if last.get("status") == "True" else None


def _outlived_since(status: Raw, terminated: Raw | None) -> datetime | None:
    """As every trainer is for a second, because the phase comes later."""
    ended = status.get("phase") in ("Succeeded", "Failed")
    return None if ended or terminated is None else parse_time(terminated.get("finishedAt"))


def _waiting(status: Raw, container: Raw) -> Waiting | None:
    for status_of, image in (
        (container, "spec.image"),
        *((before, f"the image of {before['name']}") for before in status.get("initContainerStatuses") or []),
    ):
        waiting = (status_of.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in ("ContainerCreating", "PodInitializing"):
            return Waiting(waiting["reason"], waiting.get("message", ""), image)
    placed = _condition(status, "PodScheduled")
    if placed.get("status") == "False":
        return Waiting(placed.get("reason", "Unschedulable"), placed.get("message", ""))
    return None


def _condition(status: Raw, kind: str) -> Raw:
    return next((condition for condition in status.get("conditions") or [] if condition["type"] == kind), {})


def _evidence(pod: Raw, terminated: Raw, said: Termination | None, *, node_rank: int, gone: bool) -> Evidence:
    status = pod.get("status") or {}
    disruption = _condition(status, "DisruptionTarget")
    disruption = disruption if disruption.get("status") == "True" else {}
    return Evidence(
        node_rank=node_rank,
        pod_name=pod["metadata"]["name"],
        k8s_node=(pod.get("spec") or {}).get("nodeName", ""),
        ended=gone or bool(terminated) or status.get("phase") in ("Succeeded", "Failed"),
        # the pod's own reason (Evicted, DeadlineExceeded) explains more than the container's Error
        reason=status.get("reason") or terminated.get("reason", ""),
        disruption=disruption.get("reason", ""),
        outcome=said.outcome if said else "",
        error_type=said.error_type if said else "",
        victim=said.victim if said else False,
        exit_code=terminated.get("exitCode"),
        rank=said.rank if said else None,
        signal=said.signal if said else terminated.get("signal"),
        message=_message(status, disruption, terminated, said),
        last_step=said.progress.step if said and said.progress else None,
        finished_at=_finished_at(terminated, said),
    )


def _message(status: Raw, disruption: Raw, terminated: Raw, said: Termination | None) -> str:
    """The most telling text there is; of a log only its end."""
    if said:
        return said.message[:MESSAGE_CHARACTERS]
    text: str = status.get("message") or disruption.get("message") or terminated.get("message") or ""
    return text.strip()[-MESSAGE_CHARACTERS:]


def _finished_at(terminated: Raw, said: Termination | None) -> datetime | None:
    """The supervisor's own clock if it spoke: Kubernetes gives whole seconds, too coarse to find the first failure."""
    if said and said.final and said.time is not None:
        return datetime.fromtimestamp(said.time, UTC)
    return parse_time(terminated.get("finishedAt"))
