"""What keeps an attempt from starting: things that may still appear are waited for, others end the job."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import WaitStatus
from finetune_operator.failures.container_start_rules import CONFIG_ERROR, not_made
from finetune_operator.failures.verdict import Verdict, where
from finetune_operator.observation.pods import Life, NodeObservation, Observation, Refusal, Waiting

IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
)
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*"(: ErrImagePull)?(: )?')
_REGISTRY_IN_TROUBLE = re.compile(
    r"(error|status:?) 429|429 Too Many|toomanyrequests|50[0234] (Internal|Bad|Service|Gateway)|\(50[0234]\)"
    r"|i/o timeout|handshake timeout|deadline exceeded|Client\.Timeout|connection (refused|reset|timed out)"
    r"|network is unreachable|no route to host|\bEOF\b|server misbehaving|temporary failure in name",
    re.IGNORECASE,
)
_MACHINE_IN_TROUBLE = re.compile(
    r"no space left on device|failed to (extract|register) layer|failed to unpack image|input/output error"
    r"|read-only file system"
)
_TRIED_AGAIN = "is tried again until the registry, and the way to it, are well"
REFUSED = frozenset({Reason.PREDECESSOR_TERMINATING, Reason.NAME_TAKEN, Reason.CREATE_REFUSED})
SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})
MAKING_PATIENCE = timedelta(seconds=60)  # with a container that is being made, before it is told
PULL_PATIENCE = timedelta(minutes=10)
CREATE_PATIENCE = timedelta(minutes=3)  # with a kubelet that cannot make a container, and tries again
UNPROCESSABLE, BAD_REQUEST = 422, 400


@dataclass(frozen=True)
class Wait:
    """Why pods do not start. `image`: waited for with a limit; `hopeless`: no time will help; `usual`: time will.

    `verdict`: on the attempt, if it lasts.
    """

    reason: str
    message: str
    image: bool = False
    hopeless: bool = False
    usual: bool = False
    verdict: Verdict | None = None

    @property
    def patience(self) -> timedelta | None:
        """How long it is waited for at most, whatever the job's own limits are."""
        if self.image:
            return timedelta() if self.hopeless else PULL_PATIENCE
        return CREATE_PATIENCE if self.verdict else None

    @property
    def for_ever(self) -> bool:
        """As far as anybody knows: other nodes do not keep their machines for it."""
        return not self.image and not self.usual


def waiting_for(job: FineTuneJob, seen: Observation, nodes: Sequence[NodeObservation], now: datetime) -> Wait | None:
    """The most telling reason why not all pods run, or None if nothing is known to be missing."""
    if seen.refusals:
        return _explain_refusal(seen.refusals[0])
    blocked = [(node, node.waiting) for node in nodes if node.life is Life.PENDING and node.waiting]
    if not blocked:
        return _being_made(nodes, now)
    avoids = ", ".join(job.status.attempts[-1].avoids) if job.status.attempts else ""
    away = f"; kept away from {avoids}, which failed this job before" if avoids else ""
    share = f"{len(blocked)} of {job.spec.num_nodes} pods"
    told = job.status.waiting
    waits = [
        _explain_image(node, waiting, told) if waiting.reason in IMAGE_REASONS else _explain(node, waiting, share, away)
        for node, waiting in blocked
    ]
    return max(waits, key=lambda wait: (wait.hopeless, wait.image, wait.reason != Reason.UNSCHEDULABLE))


def _explain_refusal(refusal: Refusal) -> Wait:
    if refusal.leaving:
        return Wait(Reason.PREDECESSOR_TERMINATING, f"{refusal.message}; waited for until it is gone")
    if refusal.taken:
        return Wait(Reason.NAME_TAKEN, f"{_foreign(refusal)}; the job goes on once that is deleted")
    return Wait(Reason.CREATE_REFUSED, f"{refusal.kind} {refusal.name}: {refusal.message}")


def _foreign(refusal: Refusal) -> str:
    return f"{refusal.kind} {refusal.name} exists and does not belong to this job"


def _explain(node: NodeObservation, waiting: Waiting, share: str, away: str) -> Wait:
    verdict = not_made(node.evidence.model_copy(update={"reason": waiting.reason, "message": waiting.message}))
    if verdict is not None:
        said = f"{node.pod_name} on {node.k8s_node}: {waiting.message}; its kubelet tries again"
        return Wait(Reason.CREATE_CONTAINER_ERROR, said, verdict=verdict)
    if waiting.reason == CONFIG_ERROR:
        return Wait(
            Reason.CONFIG_MISSING, f"{node.pod_name}: {waiting.message}; create what is missing and the pod starts"
        )
    if waiting.reason == Reason.UNSCHEDULABLE:
        return Wait(Reason.UNSCHEDULABLE, f"{share} cannot be placed: {waiting.message}{away}")
    return Wait(waiting.reason, f"{node.pod_name}: {waiting.message}")


def _explain_image(node: NodeObservation, waiting: Waiting, told: WaitStatus | None) -> Wait:
    """An image that a registry in trouble does not give is waited for without limit; kubelets tell why now and then."""
    cause = _BACK_OFF.sub("", waiting.message)
    known = told.message if told is not None and told.reason == Reason.IMAGE_PULL_FAILED and not cause else ""
    there = f"{node.pod_name} on {node.k8s_node}"
    if _MACHINE_IN_TROUBLE.search(cause or known):
        verdict = Verdict(
            Reason.CONTAINER_RUNTIME_ERROR, f"{where(node.evidence)}: {cause or known}", evidence=node.evidence
        )
        return Wait(Reason.IMAGE_PULL_FAILED, known or f"{there}: {cause}; its kubelet tries again", verdict=verdict)
    if known:
        message = known
    elif _REGISTRY_IN_TROUBLE.search(cause):
        message = f"{there}: {cause}; {waiting.image} {_TRIED_AGAIN}"
    else:
        message = f"{node.pod_name}: {cause or waiting.reason}; check {waiting.image} and spec.imagePullSecrets"
    lasting = message.endswith(_TRIED_AGAIN)
    return Wait(Reason.IMAGE_PULL_FAILED, message, image=not lasting, hopeless=waiting.reason == "InvalidImageName")


def _being_made(nodes: Sequence[NodeObservation], now: datetime) -> Wait | None:
    """Of kubelets that have taken long and say nothing: what they are at."""
    slow = [node for node in nodes if (node.being_made_for(now) or timedelta()) >= MAKING_PATIENCE]
    for node in sorted(slow, key=lambda node: node.ready_to_start is not False):
        there, more = f"{node.pod_name} on {node.k8s_node}", f"kubectl describe pod {node.pod_name} tells more"
        if node.ready_to_start is False:
            return Wait(Reason.VOLUMES_NOT_READY, f"{there}: its volumes or network are not ready; {more}")
        return Wait(
            Reason.CONTAINER_CREATING,
            f"{there}: its image is being pulled, or an init container runs; {more}",
            usual=True,
        )
    return None


def claim_names(job: FineTuneJob) -> tuple[str, ...]:
    """The PersistentVolumeClaims a job mounts, the output's first."""
    volumes = [v.persistent_volume_claim.claim_name for v in job.spec.volumes if v.persistent_volume_claim]
    output = _output_claim(job)
    return tuple(dict.fromkeys((output, *volumes) if output else volumes))


def _output_claim(job: FineTuneJob) -> str | None:
    return job.spec.output.persistent_volume_claim.claim_name if job.spec.output else None


def refused_for_good(job: FineTuneJob, seen: Observation) -> Verdict | None:
    """What no time will mend: a spec the API server calls invalid, a name that is taken, storage for one node only.

    Of a job that ran before, what is refused now was changed by others, who can change it back: nothing is given up.
    """
    ran = any(record.created for record in job.status.attempts)
    for refusal in () if ran else seen.refusals:
        if refusal.taken:
            return _never(Reason.NAME_TAKEN, f"{_foreign(refusal)}; delete it or rename the job")
        if refusal.status in (UNPROCESSABLE, BAD_REQUEST):
            return _never(Reason.INVALID_SPEC, f"{refusal.kind} {refusal.name}: {refusal.message}")
    if job.spec.num_nodes == 1:
        return None
    output = _output_claim(job)
    for claim in seen.claims or ():
        good = claim.access_modes and ("ReadWriteMany" in claim.access_modes or claim.name != output)
        if not good or not SHARED_MODES & set(claim.access_modes):
            needed = "ReadWriteMany" if claim.name == output else "ReadWriteMany or ReadOnlyMany"
            message = (
                f"PersistentVolumeClaim {claim.name} is {', '.join(claim.access_modes) or 'of no access mode'}, but"
                f" {job.spec.num_nodes} nodes mount it: it must be {needed}"
            )
            return _never(Reason.INVALID_SPEC, message)
    return None


def _never(reason: Reason, message: str) -> Verdict:
    return Verdict(reason=reason, message=message)
