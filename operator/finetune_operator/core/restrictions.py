"""States in one condition of a job what the operator may not do for it in this installation (decisions/140)."""

from collections.abc import Iterable, Sequence

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Condition
from finetune_operator.core.conditions import ConditionBuilder

OPERATOR_RESTRICTED = "OperatorRestricted"


def restate_restrictions(
    conditions: Iterable[Condition], builder: ConditionBuilder, missing_rights: Sequence[str], *, ignores_ttl: bool
) -> tuple[Condition, ...]:
    """Return the conditions with OperatorRestricted as it is now: absent, or True with all restrictions.

    missing_rights: that the API server refuses to the operator, such as `create pods`.
    ignores_ttl: whether the job has a TTL, but the operator deletes no jobs.
    """
    restrictions = []
    if missing_rights:
        message = f"the operator has no permission to {', '.join(missing_rights)}; grant it to the operator's role"
        restrictions.append((Reason.PERMISSION_MISSING, message))
    if ignores_ttl:
        message = "spec.ttlSecondsAfterFinished is ignored, because the chart value deleteFinishedJobs is false"
        restrictions.append((Reason.TTL_IGNORED, message))
    others = tuple(condition for condition in conditions if condition.type != OPERATOR_RESTRICTED)
    if not restrictions:
        return others
    message = "; ".join(message for _, message in restrictions)
    return (*others, builder.build(OPERATOR_RESTRICTED, True, restrictions[0][0], message))
