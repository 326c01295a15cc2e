"""Tests of the detection of rejected creates and claims that a retry cannot fix."""

import pytest

from finetune_api.v1alpha1.reasons import FailureAction
from finetune_api.v1alpha1.status import AttemptRecord, Fault, JobStatus
from finetune_operator.core.pending_reasons import PendingReason, find_pending_reason
from finetune_operator.failures.create_rejections import collect_claim_names, find_permanent_rejection
from finetune_operator.observation.pods import Claim, Observation, RejectedCreate
from testing.builders.jobs import NOW, build_observation, command, job

JOB = job()
QUOTA = RejectedCreate("Pod", "bert-0-0", 403, "exceeded quota: gpus")


def test_claim_names_are_unique_and_start_with_the_output_claim() -> None:
    volumes = [
        {"name": "a", "mountPath": "/a", "persistentVolumeClaim": {"claimName": "datasets"}},
        {"name": "b", "mountPath": "/b", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "c", "mountPath": "/c", "persistentVolumeClaim": {"claimName": "datasets"}},
        {"name": "d", "mountPath": "/d", "emptyDir": {}},
    ]
    assert collect_claim_names(job(volumes=volumes)) == ("models", "datasets")


@pytest.mark.parametrize(
    ("rejected_create", "reason", "message"),
    [
        pytest.param(
            RejectedCreate("Service", "bert", 409, "exists", name_taken=True),
            "NameTaken",
            "Service bert exists and does not belong to this job; delete it or rename the job",
            id="name taken",
        ),
        pytest.param(
            RejectedCreate("Pod", "bert-0-0", 422, "spec.x: Invalid value"),
            "InvalidSpec",
            "Pod bert-0-0: spec.x: Invalid value",
            id="invalid object",
        ),
    ],
)
def test_a_permanent_rejection_fails_the_job_as_a_user_fault(
    rejected_create: RejectedCreate, reason: str, message: str
) -> None:
    verdict = find_permanent_rejection(JOB, Observation(rejected_creates=(QUOTA, rejected_create)))
    assert verdict is not None
    assert (verdict.reason, verdict.message) == (reason, message)
    assert (verdict.fault, verdict.action) == (Fault.USER, FailureAction.FAIL)


@pytest.mark.parametrize(
    ("rejected_creates", "expected"),
    [
        pytest.param(
            RejectedCreate("Service", "bert", 409, "exists", name_taken=True),
            PendingReason(
                "NameTaken", "Service bert exists and does not belong to this job; the job continues once it is deleted"
            ),
            id="name taken meanwhile",
        ),
        pytest.param(
            RejectedCreate("Pod", "bert-1-0", 422, "ValidatingAdmissionPolicy 'new' denied request"),
            PendingReason("CreateRefused", "Pod bert-1-0: ValidatingAdmissionPolicy 'new' denied request"),
            id="new admission policy",
        ),
        pytest.param(
            RejectedCreate("Pod", "bert-1-0", 413, "too large"),
            PendingReason("CreateRefused", "Pod bert-1-0: too large"),
            id="object too large",
        ),
    ],
)
def test_rejected_creates_are_retried_after_the_job_has_run(
    rejected_creates: RejectedCreate, expected: PendingReason
) -> None:
    attempts = (AttemptRecord(attempt=0, state="Failed", created=True), AttemptRecord(attempt=1, state="Starting"))
    ftjob = job(status=JobStatus(attempt=1, attempts=attempts))
    observation = Observation(rejected_creates=(rejected_creates,))
    assert find_permanent_rejection(ftjob, observation) is None
    assert find_pending_reason(ftjob, observation, (), NOW) == expected


def test_exceeded_quota_is_not_a_permanent_rejection() -> None:
    assert find_permanent_rejection(JOB, Observation(rejected_creates=(QUOTA,))) is None


@pytest.mark.parametrize(
    ("claim", "access_modes", "message"),
    [
        pytest.param("models", ("ReadWriteMany",), None, id="output read-write-many"),
        pytest.param("models", ("ReadWriteOnce", "ReadWriteMany"), None, id="output with two modes"),
        pytest.param("datasets", ("ReadOnlyMany",), None, id="data read-only-many"),
        pytest.param("datasets", ("ReadWriteMany",), None, id="data read-write-many"),
        pytest.param(
            "models",
            ("ReadOnlyMany",),
            "PersistentVolumeClaim models is ReadOnlyMany, but 2 nodes mount it: it must be ReadWriteMany",
            id="output read-only",
        ),
        pytest.param(
            "datasets",
            ("ReadWriteOnce", "ReadWriteOncePod"),
            "PersistentVolumeClaim datasets is ReadWriteOnce, ReadWriteOncePod, but 2 nodes mount it: it must be"
            " ReadWriteMany or ReadOnlyMany",
            id="data for a single node",
        ),
        pytest.param(
            "datasets",
            (),
            "PersistentVolumeClaim datasets is without access mode, but 2 nodes mount it: it must be ReadWriteMany or"
            " ReadOnlyMany",
            id="no access mode",
        ),
    ],
)
def test_claims_mounted_by_several_nodes_must_be_shared(
    claim: str, access_modes: tuple[str, ...], message: str | None
) -> None:
    observation = Observation(claims=(Claim(claim, access_modes),))
    verdict = find_permanent_rejection(JOB, observation)
    assert (verdict.message if verdict else None) == message
    assert find_permanent_rejection(job(numNodes=1), observation) is None


def test_command_without_output_mounts_only_the_claims_of_its_volumes() -> None:
    fields = command({"script": "train.py"}, output=None)

    assert collect_claim_names(job(**fields)) == ("datasets",)
    observation = build_observation(job(**fields), claims=(Claim("datasets", ("ReadOnlyMany",)),))
    assert find_permanent_rejection(job(**fields), observation) is None


def test_a_denial_without_a_status_code_is_retried() -> None:
    """The API server reports 400 for a webhook that denies without a code, as a policy engine does after a timeout."""
    denied = RejectedCreate(
        "Pod", "bert-0-0", 400, "admission webhook denied the request: image verification timed out"
    )

    assert find_permanent_rejection(JOB, Observation(rejected_creates=(denied,))) is None
