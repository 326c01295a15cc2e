"""Expected results of faults that prevent a start."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import Expectation, expect_failure, expect_restart

STARTS = (
    Expectation(
        "image-missing",
        "an image that does not exist; pendingDeadlineSeconds 30",
        expect_failure(Reason.PENDING_DEADLINE_EXCEEDED),
        pending_reason=Reason.IMAGE_PULL_FAILED,
    ),
    Expectation("image-name-invalid", "spec.image is not a valid image name", expect_failure(Reason.IMAGE_PULL_FAILED)),
    Expectation("image-without-python", "spec.image has no Python", expect_failure(Reason.START_ERROR)),
    Expectation(
        "unschedulable",
        "no Kubernetes node matches the nodeSelector for 8 s",
        pending_reason=Reason.UNSCHEDULABLE,
        max_steps_lost=0,
    ),
    Expectation(
        "unschedulable-for-ever",
        "no Kubernetes node matches the nodeSelector; pendingDeadlineSeconds 10",
        expect_failure(Reason.PENDING_DEADLINE_EXCEEDED),
        pending_reason=Reason.UNSCHEDULABLE,
    ),
    Expectation(
        "gang-incomplete",
        "only one of two pods can be scheduled for 16 s; startupDeadlineSeconds 8",
        expect_restart(Reason.GANG_INCOMPLETE),
        pending_reason=Reason.UNSCHEDULABLE,
    ),
    Expectation(
        "quota", "a ResourceQuota allows no pod for 8 s", pending_reason=Reason.CREATE_REFUSED, max_steps_lost=0
    ),
    Expectation(
        "secret-missing",
        "a Secret in spec.env is created after 8 s",
        pending_reason=Reason.CONFIG_MISSING,
        max_steps_lost=0,
    ),
    Expectation("dns-blocked", "the DNS server is stopped for the first 20 s", max_steps_lost=0),
    Expectation("name-taken", "another Service already has the job's name", expect_failure(Reason.NAME_TAKEN)),
)
