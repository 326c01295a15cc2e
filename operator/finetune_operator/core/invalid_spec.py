"""Fails jobs that the API server accepted although their spec is invalid."""

from datetime import datetime

from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain_validation_error
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptState, Condition, JobStatus, Phase
from finetune_operator.core.actions import DeletePod, EmitEvent
from finetune_operator.core.conditions import keep_transition_times
from finetune_operator.core.decision import Decision
from finetune_operator.core.job_context import ABORT_GRACE_SECONDS
from finetune_operator.observation.pods import Observation

CONDITIONS = (("Running", "False"), ("Failed", "True"), ("Finished", "True"), ("Stalled", "True"))


def decide_invalid_spec(
    status: JobStatus, error: ValidationError, observation: Observation, now: datetime, *, generation: int
) -> Decision:
    """Fail the job with one message per invalid field, and delete its running pods."""
    deletions = tuple(
        DeletePod(node.pod_name, node.uid, ABORT_GRACE_SECONDS)
        for node in observation.live_nodes()
        if node.may_run(now) and not node.deleting
    )
    if status.completion_time is not None:
        return Decision(status, deletions)
    message = explain_validation_error(error)
    conditions = tuple(
        Condition(
            type=condition_type,
            status="True" if value == "True" else "False",
            observed_generation=generation,
            last_transition_time=now,
            reason=Reason.INVALID_SPEC,
            message=message,
        )
        for condition_type, value in CONDITIONS
    )
    update: dict[str, object] = {
        "observed_generation": generation,
        "phase": Phase.FAILED,
        "completion_time": now,
        "conditions": keep_transition_times(conditions, status.conditions),
    }
    if status.attempts:
        ended_fields = {
            "state": AttemptState.FAILED,
            "end_time": now,
            "reason": Reason.INVALID_SPEC,
            "message": message,
        }
        update["attempts"] = (*status.attempts[:-1], status.attempts[-1].model_copy(update=ended_fields))
    event = EmitEvent("Warning", Reason.INVALID_SPEC, message, "end")
    return Decision(status.model_copy(update=update), (*deletions, event))
