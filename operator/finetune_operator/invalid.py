"""A job whose spec cannot be read: what the models refuse although the API server took it."""

from datetime import datetime
from typing import Any

from pydantic import ValidationError

from finetune_api.reasons import Reason
from finetune_api.status import Condition, JobStatus, Phase
from finetune_operator.case import Decision
from finetune_operator.conditions import keep_transition_times

CONDITIONS = (("Running", "False"), ("Failed", "True"), ("Finished", "True"), ("Stalled", "True"))


def decide_invalid(job: dict[str, Any], error: ValidationError, now: datetime) -> Decision | None:
    """Failed with what is wrong, field by field; None if that has been said or the job is going away."""
    status = JobStatus.model_validate(job.get("status") or {})
    if status.completion_time is not None or job["metadata"].get("deletionTimestamp"):
        return None
    message, generation = explain(error), job["metadata"].get("generation", 0)
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
    update = {
        "observed_generation": generation,
        "phase": Phase.FAILED,
        "completion_time": now,
        "conditions": keep_transition_times(conditions, status.conditions),
    }
    return Decision(status.model_copy(update=update))


def explain(error: ValidationError) -> str:
    """`spec.numNodes: ...; spec.model: ...`: where, and what is wrong there."""
    return "; ".join(explain_each(error))


def explain_each(error: ValidationError) -> tuple[str, ...]:
    """One line per problem."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    blamed = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    return tuple(
        f"{_where(problem['loc'])}: {_what(problem['type'], problem['msg'])}"
        for problem in problems
        # pydantic does not count items that are wrong themselves
        if not (problem["type"] == "too_short" and problem["loc"] in blamed)
    )


def _where(location: tuple[int | str, ...]) -> str:
    """`spec.dataset.train[0].name`, as kubectl writes it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _what(kind: str, message: str) -> str:
    """In the words of the API server where pydantic's are those of Python."""
    match kind:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "unknown field"
        case "too_short":
            return message.replace("Tuple should", "List should").removesuffix(" after validation, not 0")
        case _:
            return message.removeprefix("Value error, ")
