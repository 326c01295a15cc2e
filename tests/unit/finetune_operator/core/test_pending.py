"""Why an attempt does not start: what is waited for, and what no time will mend."""

from datetime import datetime, timedelta

import pytest

from finetune_api.v1alpha1.reasons import FailureAction
from finetune_api.v1alpha1.status import AttemptRecord, Fault, JobStatus, WaitStatus
from finetune_operator.core.pending import CREATE_PATIENCE, Wait, claim_names, refused_for_good, waiting_for
from finetune_operator.observation.pods import Claim, Observation, Refusal
from testing.builders.jobs import NOW, Raw, command, job, pod, running, seen

OF = job()
QUOTA = Refusal("Pod", "bert-0-0", 403, "exceeded quota: gpus")


def stuck(node_rank: int, reason: str, message: str = "") -> Raw:
    """A pod whose container waits."""
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(OF, node_rank, containerStatuses=[{"name": "trainer", "state": state}])


def unplaced(node_rank: int) -> Raw:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}
    return pod(OF, node_rank, conditions=[scheduled])


def placed(node_rank: int, ready: str = "", state: Raw | None = None) -> Raw:
    """A pod that the scheduler gave a machine at NOW; `ready`: what its kubelet says of volumes and network."""
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": NOW.isoformat()}]
    if ready:
        conditions.append({**conditions[0], "type": "PodReadyToStartContainers", "status": ready})
    statuses = [{"name": "trainer", "state": state or {"waiting": {"reason": "ContainerCreating"}}}]
    return pod(OF, node_rank, conditions=conditions, containerStatuses=statuses)


def wait(*pods: Raw, refusals: tuple[Refusal, ...] = (), now: datetime = NOW) -> Wait | None:
    observation = seen(OF, *pods, refusals=refusals)
    return waiting_for(OF, observation, observation.of_attempt(0), now)


def because(*pods: Raw, refusals: tuple[Refusal, ...] = ()) -> str:
    found = wait(*pods, refusals=refusals)
    assert found is not None
    return found.reason


def test_nothing_is_missing_while_pods_are_made_ready() -> None:
    assert wait(pod(OF, 0), running(OF, 1)) is None
    assert wait() is None


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        pytest.param(
            "ErrImagePull",
            Wait("ImagePullFailed", "bert-0-0: no such tag; check spec.image and spec.imagePullSecrets", image=True),
            id="an image that may still appear",
        ),
        pytest.param(
            "InvalidImageName",
            Wait(
                "ImagePullFailed",
                "bert-0-0: no such tag; check spec.image and spec.imagePullSecrets",
                image=True,
                hopeless=True,
            ),
            id="an image that cannot exist",
        ),
        pytest.param(
            "CreateContainerConfigError",
            Wait("ConfigMissing", "bert-0-0: no such tag; create what is missing and the pod starts"),
            id="a secret or key that is missing",
        ),
        pytest.param("CrashLoopBackOff", Wait("CrashLoopBackOff", "bert-0-0: no such tag"), id="in Kubernetes' words"),
    ],
)
def test_a_container_that_waits_is_told_to_those_who_can_help(reason: str, expected: Wait) -> None:
    assert wait(stuck(0, reason, "no such tag"), running(OF, 1)) == expected


NOT_FOUND = 'failed to resolve reference "example.com/none:1": example.com/none:1: not found'
BACK_OFF = 'Back-off pulling image "example.com/none:1"'


def pulls(message: str, *, told: str = "", reason: str = "ImagePullBackOff") -> Wait:
    """What is told of an image, when this was told before."""
    status = JobStatus(waiting=WaitStatus(reason="ImagePullFailed", message=told, since=NOW)) if told else JobStatus()
    of = job(status=status)
    observation = seen(of, stuck(0, reason, message), running(of, 1))
    found = waiting_for(of, observation, observation.of_attempt(0), NOW)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("message", "transient"),
    [
        (NOT_FOUND, False),
        ("pull access denied: failed to authorize: unexpected status: 401 Unauthorized", False),
        ("dial tcp: lookup registry.exampel.com: no such host", False),
        # as of namespacelabs/foundation #846, rook #13567, containerd #8971, docker/hub-feedback #2082, cri-o #189
        ("unexpected status code https://registry-1.docker.io/v2/x/manifests/y: 429 Too Many Requests", True),
        ('Get "https://quay.io/v2/": dial tcp 3.216.1.2:443: i/o timeout', True),
        ("httpReadSeeker: failed open: failed to do request: Get https://harbor.example/v2/x: EOF", True),
        ("unexpected status from HEAD request to https://registry-1.docker.io/v2/x: 503 Service Unavailable", True),
        ("rpc error: code = 4 desc = context deadline exceeded", True),
        ("failed to extract layer: write /var/lib/containerd/x: no space left on device", True),
    ],
)
def test_a_registry_in_trouble_is_waited_for_without_limit(message: str, transient: bool) -> None:
    for said in (message, f"{BACK_OFF}: ErrImagePull: {message}"):
        found = pulls(said)
        assert (found.image, found.for_ever) == (not transient, transient)
        assert message in found.message
        assert ("check spec.image" in found.message) is not transient


def test_a_back_off_without_a_cause_is_told_by_the_last_one() -> None:
    for cause in (NOT_FOUND, "dial tcp 10.0.0.1:443: connect: connection refused"):
        first = pulls(cause, reason="ErrImagePull")
        assert pulls(BACK_OFF, told=first.message) == first
    assert pulls(BACK_OFF).message.startswith("bert-0-0: ImagePullBackOff; check spec.image")


FULL = "failed to register layer: write /x.rpm: no space left on device"


def test_a_machine_that_cannot_unpack_an_image_is_left_whatever_its_kubelet_says_meanwhile() -> None:
    full = pulls(FULL, reason="ErrImagePull")
    later = pulls(BACK_OFF, told=full.message)
    for wait in (full, later):
        assert wait.verdict is not None
        assert (wait.reason, wait.verdict.reason, wait.patience) == (
            "ImagePullFailed",
            "ContainerRuntimeError",
            CREATE_PATIENCE,
        )
    assert later.message == full.message
    assert full.message == f"bert-0-0 on gpu-0: {FULL}; its kubelet tries again"


def test_an_image_error_without_words_is_told_by_its_reason() -> None:
    found = wait(stuck(0, "ImagePullBackOff"))
    assert found is not None
    assert found.message.startswith("bert-0-0: ImagePullBackOff; ")


def test_of_pods_without_a_place_it_is_told_how_many_of_how_many() -> None:
    assert wait(unplaced(0), running(OF, 1)) == Wait("Unschedulable", "1 of 2 pods cannot be placed: 0/3 nodes fit")
    assert wait(unplaced(0), unplaced(1)) == Wait("Unschedulable", "2 of 2 pods cannot be placed: 0/3 nodes fit")


@pytest.mark.parametrize(
    ("pods", "reason"),
    [
        pytest.param((unplaced(0), stuck(1, "CreateContainerConfigError")), "ConfigMissing", id="over no place"),
        pytest.param(
            (stuck(0, "CreateContainerConfigError"), stuck(1, "ErrImagePull")), "ImagePullFailed", id="an image"
        ),
        pytest.param((unplaced(0), stuck(1, "ErrImagePull")), "ImagePullFailed", id="an image over no place"),
    ],
)
def test_what_needs_a_person_is_told_first(pods: tuple[Raw, ...], reason: str) -> None:
    assert because(*pods) == because(*reversed(pods)) == reason


def test_a_hopeless_image_is_told_before_one_that_may_come() -> None:
    found = wait(stuck(0, "ErrImagePull"), stuck(1, "InvalidImageName"))
    assert found is not None
    assert found.hopeless


def test_a_quota_is_told_before_what_pods_wait_for() -> None:
    assert wait(stuck(0, "ErrImagePull"), refusals=(QUOTA,)) == Wait(
        "CreateRefused", "Pod bert-0-0: exceeded quota: gpus"
    )


def test_a_webhook_that_does_not_answer_is_told_in_its_words() -> None:
    webhook = Refusal("Pod", "bert-0-0", 500, "failed calling webhook")
    assert refused_for_good(OF, seen(OF, refusals=(webhook,))) is None
    assert wait(refusals=(webhook,)) == Wait("CreateRefused", "Pod bert-0-0: failed calling webhook")


def test_what_a_deleted_job_of_the_name_left_is_waited_for() -> None:
    left = Refusal(
        "Pod", "bert-0-0", 409, "Pod bert-0-0 of a deleted job of the same name is still there", leaving=True
    )
    assert refused_for_good(OF, seen(OF, refusals=(left,))) is None
    assert wait(refusals=(left,)) == Wait("PredecessorTerminating", f"{left.message}; waited for until it is gone")


def test_a_pod_that_runs_or_is_gone_is_not_waited_for() -> None:
    gone = Observation(nodes=seen(OF, gone=(stuck(0, "ErrImagePull"),)).nodes)
    assert len(gone.nodes) == 1
    assert waiting_for(OF, gone, gone.nodes, NOW + timedelta(hours=1)) is None


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        pytest.param("False", ("VolumesNotReady", "its volumes or network are not ready", False), id="mounting"),
        pytest.param(
            "True", ("ContainerCreating", "its image is being pulled, or an init container runs", True), id="pulling"
        ),
        pytest.param(
            "", ("ContainerCreating", "its image is being pulled, or an init container runs", True), id="an old kubelet"
        ),
    ],
)
def test_a_kubelet_that_takes_long_and_says_nothing_is_told_after_a_minute(
    ready: str, expected: tuple[str, str, bool]
) -> None:
    pods = (placed(0, ready), running(OF, 1))
    assert wait(*pods, now=NOW + timedelta(seconds=59)) is None
    found = wait(*pods, now=NOW + timedelta(seconds=60))
    reason, words, usual = expected
    more = "kubectl describe pod bert-0-0 tells more"
    assert found == Wait(reason, f"bert-0-0 on gpu-0: {words}; {more}", usual=usual)


def test_of_pods_that_are_being_made_one_whose_volumes_are_missing_is_told() -> None:
    late = NOW + timedelta(hours=1)
    found = wait(placed(0, "True"), placed(1, "False"), now=late)
    assert found is not None
    assert found.message.startswith("bert-0-1 on gpu-1: its volumes")
    assert wait(placed(0, "True"), unplaced(1), now=late) == wait(unplaced(1))


def test_claims_are_named_once_and_the_outputs_first() -> None:
    volumes = [
        {"name": "a", "mountPath": "/a", "persistentVolumeClaim": {"claimName": "datasets"}},
        {"name": "b", "mountPath": "/b", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "c", "mountPath": "/c", "persistentVolumeClaim": {"claimName": "datasets"}},
        {"name": "d", "mountPath": "/d", "emptyDir": {}},
    ]
    assert claim_names(job(volumes=volumes)) == ("models", "datasets")


@pytest.mark.parametrize(
    ("refusal", "reason", "message"),
    [
        pytest.param(
            Refusal("Service", "bert", 409, "exists", taken=True),
            "NameTaken",
            "Service bert exists and does not belong to this job; delete it or rename the job",
            id="a name that is taken",
        ),
        pytest.param(
            Refusal("Pod", "bert-0-0", 422, "spec.x: Invalid value"),
            "InvalidSpec",
            "Pod bert-0-0: spec.x: Invalid value",
            id="an invalid object",
        ),
        pytest.param(
            Refusal("Pod", "bert-0-0", 400, "unknown field"),
            "InvalidSpec",
            "Pod bert-0-0: unknown field",
            id="a bad request",
        ),
    ],
)
def test_what_no_time_will_mend_is_the_users_to_mend(refusal: Refusal, reason: str, message: str) -> None:
    verdict = refused_for_good(OF, Observation(refusals=(QUOTA, refusal)))
    assert verdict is not None
    assert (verdict.reason, verdict.message) == (reason, message)
    assert (verdict.fault, verdict.action) == (Fault.USER, FailureAction.FAIL)


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        pytest.param(
            Refusal("Service", "bert", 409, "exists", taken=True),
            Wait(
                "NameTaken", "Service bert exists and does not belong to this job; the job goes on once that is deleted"
            ),
            id="a name that somebody took meanwhile",
        ),
        pytest.param(
            Refusal("Pod", "bert-1-0", 422, "ValidatingAdmissionPolicy 'new' denied request"),
            Wait("CreateRefused", "Pod bert-1-0: ValidatingAdmissionPolicy 'new' denied request"),
            id="a policy that is new",
        ),
        pytest.param(
            Refusal("Pod", "bert-1-0", 413, "too large"), Wait("CreateRefused", "Pod bert-1-0: too large"), id="size"
        ),
    ],
)
def test_what_is_refused_of_a_job_that_ran_before_is_waited_for(refusal: Refusal, expected: Wait) -> None:
    attempts = (AttemptRecord(attempt=0, state="Failed", created=True), AttemptRecord(attempt=1, state="Starting"))
    of = job(status=JobStatus(attempt=1, attempts=attempts))
    seen_now = Observation(refusals=(refusal,))
    assert refused_for_good(of, seen_now) is None
    assert waiting_for(of, seen_now, (), NOW) == expected


def test_a_quota_may_still_be_raised() -> None:
    assert refused_for_good(OF, Observation(refusals=(QUOTA,))) is None


@pytest.mark.parametrize(
    ("claim", "modes", "message"),
    [
        pytest.param("models", ("ReadWriteMany",), None, id="output for many"),
        pytest.param("models", ("ReadWriteOnce", "ReadWriteMany"), None, id="output for one or many"),
        pytest.param("datasets", ("ReadOnlyMany",), None, id="data for many readers"),
        pytest.param("datasets", ("ReadWriteMany",), None, id="data for many"),
        pytest.param(
            "models",
            ("ReadOnlyMany",),
            "PersistentVolumeClaim models is ReadOnlyMany, but 2 nodes mount it: it must be ReadWriteMany",
            id="output that cannot be written",
        ),
        pytest.param(
            "datasets",
            ("ReadWriteOnce", "ReadWriteOncePod"),
            "PersistentVolumeClaim datasets is ReadWriteOnce, ReadWriteOncePod, but 2 nodes mount it: it must be"
            " ReadWriteMany or ReadOnlyMany",
            id="data for one node",
        ),
        pytest.param(
            "datasets",
            (),
            "PersistentVolumeClaim datasets is of no access mode, but 2 nodes mount it: it must be ReadWriteMany or"
            " ReadOnlyMany",
            id="no mode at all",
        ),
    ],
)
def test_storage_must_be_shared_by_the_nodes(claim: str, modes: tuple[str, ...], message: str | None) -> None:
    observation = Observation(claims=(Claim(claim, modes),))
    verdict = refused_for_good(OF, observation)
    assert (verdict.message if verdict else None) == message
    assert refused_for_good(job(numNodes=1), observation) is None


def test_a_claim_that_nobody_looked_at_or_that_is_not_there_yet_refuses_nothing() -> None:
    assert refused_for_good(OF, Observation(claims=None)) is None
    assert refused_for_good(OF, Observation(claims=())) is None


def test_a_command_without_an_output_mounts_the_claims_of_its_volumes() -> None:
    fields = command({"script": "train.py"}, output=None)

    assert claim_names(job(**fields)) == ("datasets",)
    observation = seen(job(**fields), claims=(Claim("datasets", ("ReadOnlyMany",)),))
    assert refused_for_good(job(**fields), observation) is None


def test_the_image_of_a_container_that_somebody_injected_is_named() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}
    body = pod(OF, 0, initContainerStatuses=[{"name": "istio-init", "state": waiting}])

    found = wait(body)

    assert found is not None
    assert found.message == "bert-0-0: no such tag; check the image of istio-init and spec.imagePullSecrets"
