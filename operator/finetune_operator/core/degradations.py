"""Derives what slows the current attempt down, from the report of its trainer and from repairs of the operator."""

import re

from finetune_api.v1alpha1.status import MAX_DEGRADATIONS, AttemptState, JobStatus
from finetune_supervisor.messages import Degradation

_REASON = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")  # a reason of a condition; a report may be forged
CPU_OFFLOAD = "CpuOffload"


def derive_degradations(status: JobStatus, reported: tuple[Degradation, ...] | None) -> tuple[Degradation, ...]:
    """Return at most one degradation per reason; a starting attempt has none.

    reported: what the current attempt reports; None if it was not polled, for which the recorded ones are kept.
    """
    if not status.attempts or status.attempts[-1].state is AttemptState.STARTING:
        return ()
    candidates = [*_describe_repair(status), *(status.degraded if reported is None else reported)]
    by_reason = {each.reason: each for each in reversed(candidates) if _REASON.fullmatch(each.reason)}
    return tuple(by_reason[reason] for reason in sorted(by_reason))[:MAX_DEGRADATIONS]


def _describe_repair(status: JobStatus) -> tuple[Degradation, ...]:
    """Return a degradation if a repair offloads to host memory, which the spec does not request."""
    preset = status.repair.deepspeed if status.repair else None
    if preset is None or "offload" not in preset:
        return ()
    message = f"deepspeed preset {preset} was chosen after an out-of-memory failure; more or larger GPUs are faster"
    return (Degradation(CPU_OFFLOAD, message),)
