"""What keeps an attempt from starting: things that may still appear are waited for, others end the job."""

from collections.abc import Sequence
from dataclasses import dataclass

from finetune_api.reasons import Reason
from finetune_api.v1alpha1 import FineTuneJob
from finetune_operator.observe import Life, NodeObservation, Observation, Waiting
from finetune_operator.verdict import Verdict

IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
)
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError"})
SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})
# which may keep some nodes of a gang away while others run
INCOMPLETE_REASONS = frozenset({Reason.UNSCHEDULABLE, Reason.CREATE_REFUSED, Reason.PREDECESSOR_TERMINATING})
FORBIDDEN, UNPROCESSABLE, BAD_REQUEST = 403, 422, 400


@dataclass(frozen=True)
class Wait:
    """Why pods do not start. `image`: waited for with a limit; `hopeless`: no time will help."""

    reason: str
    message: str
    image: bool = False
    hopeless: bool = False


def waiting_for(job: FineTuneJob, seen: Observation, nodes: Sequence[NodeObservation]) -> Wait | None:
    """The most telling reason why not all pods run, or None if nothing is known to be missing."""
    for refusal in seen.refusals:
        if refusal.status == FORBIDDEN:
            return Wait(Reason.CREATE_REFUSED, f"{refusal.kind} {refusal.name}: {refusal.message}")
        if refusal.leaving:
            return Wait(Reason.PREDECESSOR_TERMINATING, f"{refusal.message}; waited for until it is gone")
    blocked = [(node, node.waiting) for node in nodes if node.life is Life.PENDING and node.waiting]
    if not blocked:
        return None
    avoids = ", ".join(job.status.attempts[-1].avoids) if job.status.attempts else ""
    away = f"; kept away from {avoids}, which failed this job before" if avoids else ""
    share = f"{len(blocked)} of {job.spec.num_nodes} pods"
    waits = [_explain(node, waiting, share, away) for node, waiting in blocked]
    return max(waits, key=lambda wait: (wait.hopeless, wait.image, wait.reason != Reason.UNSCHEDULABLE))


def _explain(node: NodeObservation, waiting: Waiting, share: str, away: str) -> Wait:
    if waiting.reason in IMAGE_REASONS:
        hopeless = waiting.reason == "InvalidImageName"
        message = (
            f"{node.pod_name}: {waiting.message or waiting.reason}; check {waiting.image} and spec.imagePullSecrets"
        )
        return Wait(Reason.IMAGE_PULL_FAILED, message, image=True, hopeless=hopeless)
    if waiting.reason in CONFIG_REASONS:
        return Wait(
            Reason.CONFIG_MISSING, f"{node.pod_name}: {waiting.message}; create what is missing and the pod starts"
        )
    if waiting.reason == Reason.UNSCHEDULABLE:
        return Wait(Reason.UNSCHEDULABLE, f"{share} cannot be placed: {waiting.message}{away}")
    return Wait(waiting.reason, f"{node.pod_name}: {waiting.message}")


def claim_names(job: FineTuneJob) -> tuple[str, ...]:
    """The PersistentVolumeClaims a job mounts, the output's first."""
    volumes = [v.persistent_volume_claim.claim_name for v in job.spec.volumes if v.persistent_volume_claim]
    output = _output_claim(job)
    return tuple(dict.fromkeys((output, *volumes) if output else volumes))


def _output_claim(job: FineTuneJob) -> str | None:
    return job.spec.output.persistent_volume_claim.claim_name if job.spec.output else None


def refused_for_good(job: FineTuneJob, seen: Observation) -> Verdict | None:
    """What no time will mend: a spec the API server calls invalid, a name that is taken, storage for one node only."""
    for refusal in seen.refusals:
        if refusal.taken:
            message = (
                f"{refusal.kind} {refusal.name} exists and does not belong to this job; delete it or rename the job"
            )
            return _never(Reason.NAME_TAKEN, message)
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
