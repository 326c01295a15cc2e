"""Fails jobs that the API server accepted although their spec is invalid."""

from datetime import datetime

from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain_validation_error
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import JobStatus, Phase
from finetune_operator.core.actions import EmitEvent
from finetune_operator.core.conditions import ConditionBuilder, keep_transition_times
from finetune_operator.core.decision import Decision


def decide_invalid_spec(status: JobStatus, error: ValidationError, now: datetime, *, generation: int) -> Decision:
    """Fail a job that never began, with one message per invalid field."""
    message = explain_validation_error(error)
    conditions = ConditionBuilder(generation, now).build_failed(Reason.INVALID_SPEC, message)
    update: dict[str, object] = {
        "observed_generation": generation,
        "phase": Phase.FAILED,
        "completion_time": now,
        "conditions": keep_transition_times(conditions, status.conditions),
    }
    event = EmitEvent("Warning", Reason.INVALID_SPEC, message, "end")
    return Decision(status.model_copy(update=update), (event,))
