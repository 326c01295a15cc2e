"""Statuses of jobs and observations of pods, which are parsed once per commit, although many invariants read them."""

from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.controller.identity_cache import IdentityCache
from finetune_operator.observation import pods
from finetune_operator.observation.pods import NodeObservation
from testing.simulator.world.apiserver import RawBody

MAX_ENTRIES = 100


def _parse_status(job: RawBody) -> JobStatus:
    return JobStatus.model_validate(job.get("status") or {})


def _observe_pod(pod: RawBody) -> NodeObservation | None:
    return pods.observe_pod(pod, is_tombstone=False)


parse_status = IdentityCache(_parse_status, max_entries=MAX_ENTRIES)
observe_pod = IdentityCache(_observe_pod, max_entries=MAX_ENTRIES)
