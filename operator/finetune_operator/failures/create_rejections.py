"""Detects rejected creates that no retry can fix, and claims that several nodes cannot share."""

import re
from contextlib import suppress

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.quantity import parse_quantity
from finetune_api.v1alpha1.reasons import Reason
from finetune_operator.failures.verdict import Verdict
from finetune_operator.observation.pods import Observation, RejectedCreate

SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})
UNPROCESSABLE = 422  # 400 is also the status of a webhook that denies without a code, for example after a timeout
_EXCEEDED_QUOTA = re.compile(
    r"exceeded quota: \S{1,253}, requested: (?P<requested>\S{1,2000}), used: \S{1,2000},"
    r" limited: (?P<limited>\S{1,2000})"
)


def collect_claim_names(job: FineTuneJob) -> tuple[str, ...]:
    """Return the names of the PersistentVolumeClaims that a job mounts, starting with the output claim."""
    volumes = [v.persistent_volume_claim.claim_name for v in job.spec.volumes if v.persistent_volume_claim]
    output_claim = _get_output_claim(job)
    return tuple(dict.fromkeys((output_claim, *volumes) if output_claim else volumes))


def _get_output_claim(job: FineTuneJob) -> str | None:
    return job.spec.output.persistent_volume_claim.claim_name if job.spec.output else None


def find_permanent_rejection(job: FineTuneJob, observation: Observation) -> Verdict | None:
    """Return a verdict if no retry can succeed: the spec is invalid, a name is taken, or nodes cannot share a claim.

    After an attempt has run, a rejected create is caused by a later change to the cluster and is retried instead of
    failing the job (decisions/204).
    """
    has_run = any(record.created for record in job.status.attempts)
    for rejected in () if has_run else observation.rejected_creates:
        if rejected.name_taken:
            return Verdict(Reason.NAME_TAKEN, f"{describe_name_conflict(rejected)}; delete it or rename the job")
        if rejected.status == UNPROCESSABLE:
            return Verdict(Reason.INVALID_SPEC, f"{rejected.kind} {rejected.name}: {rejected.message}")
    if job.spec.num_nodes == 1:
        return None
    output_claim = _get_output_claim(job)
    for claim in observation.claims or ():
        is_sufficient = claim.access_modes and ("ReadWriteMany" in claim.access_modes or claim.name != output_claim)
        if not is_sufficient or not SHARED_MODES & set(claim.access_modes):
            needed_mode = "ReadWriteMany" if claim.name == output_claim else "ReadWriteMany or ReadOnlyMany"
            message = (
                f"PersistentVolumeClaim {claim.name} is {', '.join(claim.access_modes) or 'without access mode'}, but"
                f" {job.spec.num_nodes} nodes mount it: it must be {needed_mode}"
            )
            return Verdict(Reason.INVALID_SPEC, message)
    return None


def find_quota_capacity(message: str) -> int | None:
    """Return how many such objects an empty ResourceQuota permits, from the message of a rejection; None without one.

    The message is that of Kubernetes: `exceeded quota: q, requested: pods=1, used: pods=3, limited: pods=3`.
    """
    match = _EXCEEDED_QUOTA.search(message)
    if match is None:
        return None
    requested, limited = (_parse_resources(match[name]) for name in ("requested", "limited"))
    return min((int(limited[name] // amount) for name, amount in requested.items() if name in limited), default=None)


def _parse_resources(text: str) -> dict[str, float]:
    """Return the positive quantities of a list such as `pods=1,requests.cpu=500m`."""
    quantities = {}
    for name, _, quantity in (item.partition("=") for item in text.split(",")):
        with suppress(ValueError):
            quantities[name.strip()] = parse_quantity(quantity)
    return {name: quantity for name, quantity in quantities.items() if quantity > 0}


def describe_name_conflict(rejected_create: RejectedCreate) -> str:
    """Describe an existing object that has the name of a child but a different owner."""
    return f"{rejected_create.kind} {rejected_create.name} exists and does not belong to this job"
