"""A job whose spec cannot be read: what the models refuse although the API server took it."""

from datetime import datetime

from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptState, Condition, JobStatus, Phase
from finetune_operator.core.actions import DeletePod, Emit
from finetune_operator.core.conditions import keep_transition_times
from finetune_operator.core.job_context import Decision
from finetune_operator.core.stop_attempt import ABORT_GRACE_SECONDS
from finetune_operator.observation.pods import Observation

CONDITIONS = (("Running", "False"), ("Failed", "True"), ("Finished", "True"), ("Stalled", "True"))


def decide_invalid(
    status: JobStatus, error: ValidationError, seen: Observation, now: datetime, *, generation: int
) -> Decision:
    """Failed with what is wrong, field by field, once; whatever still runs is stopped."""
    deletions = tuple(
        DeletePod(node.pod_name, node.uid, ABORT_GRACE_SECONDS)
        for node in seen.live()
        if node.may_run(now) and not node.deleting
    )
    if status.completion_time is not None:
        return Decision(status, deletions)
    message = explain(error)
    conditions = tuple(
        Condition(
            type=kind,
            status="True" if value == "True" else "False",
            observed_generation=generation,
            last_transition_time=now,
            reason=Reason.INVALID_SPEC,
            message=message,
        )
        for kind, value in CONDITIONS
    )
    update: dict[str, object] = {
        "observed_generation": generation,
        "phase": Phase.FAILED,
        "completion_time": now,
        "conditions": keep_transition_times(conditions, status.conditions),
    }
    if status.attempts:
        end = {"state": AttemptState.FAILED, "end_time": now, "reason": Reason.INVALID_SPEC, "message": message}
        update["attempts"] = (*status.attempts[:-1], status.attempts[-1].model_copy(update=end))
    event = Emit("Warning", Reason.INVALID_SPEC, message, "end")
    return Decision(status.model_copy(update=update), (*deletions, event))
