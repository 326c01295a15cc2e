"""Rejections that no retry can fix: an invalid child, a name that is taken, claims that nodes cannot share."""

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_operator.failures.verdict import Verdict
from finetune_operator.observation.pods import Observation, RejectedCreate

SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})
UNPROCESSABLE, BAD_REQUEST = 422, 400


def claim_names(job: FineTuneJob) -> tuple[str, ...]:
    """Return the names of the PersistentVolumeClaims that a job mounts, that of the output first."""
    volumes = [v.persistent_volume_claim.claim_name for v in job.spec.volumes if v.persistent_volume_claim]
    output = _get_output_claim(job)
    return tuple(dict.fromkeys((output, *volumes) if output else volumes))


def _get_output_claim(job: FineTuneJob) -> str | None:
    return job.spec.output.persistent_volume_claim.claim_name if job.spec.output else None


def find_permanent_rejection(job: FineTuneJob, observation: Observation) -> Verdict | None:
    """Return a verdict for what no retry can fix: an invalid spec, a name that is taken, single-node storage.

    Once an attempt has run, a rejected create is caused by an outside change: it is retried instead of failing the job.
    """
    has_run = any(record.created for record in job.status.attempts)  # decisions/204
    for rejected in () if has_run else observation.rejected_creates:
        if rejected.name_taken:
            return Verdict(Reason.NAME_TAKEN, f"{describe_name_conflict(rejected)}; delete it or rename the job")
        if rejected.status in (UNPROCESSABLE, BAD_REQUEST):
            return Verdict(Reason.INVALID_SPEC, f"{rejected.kind} {rejected.name}: {rejected.message}")
    if job.spec.num_nodes == 1:
        return None
    output = _get_output_claim(job)
    for claim in observation.claims or ():
        sufficient = claim.access_modes and ("ReadWriteMany" in claim.access_modes or claim.name != output)
        if not sufficient or not SHARED_MODES & set(claim.access_modes):
            needed = "ReadWriteMany" if claim.name == output else "ReadWriteMany or ReadOnlyMany"
            message = (
                f"PersistentVolumeClaim {claim.name} is {', '.join(claim.access_modes) or 'without access mode'}, but"
                f" {job.spec.num_nodes} nodes mount it: it must be {needed}"
            )
            return Verdict(Reason.INVALID_SPEC, message)
    return None


def describe_name_conflict(rejected: RejectedCreate) -> str:
    """Return a sentence about an object that has the name of a child but another owner."""
    return f"{rejected.kind} {rejected.name} exists and does not belong to this job"
