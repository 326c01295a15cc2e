"""Tests of pending reasons, and of rejected creates that fail the job."""

from datetime import datetime, timedelta

import pytest

from finetune_api.v1alpha1.status import JobStatus, WaitStatus
from finetune_operator.core.pending_reasons import CREATE_CONTAINER_TIMEOUT, PendingReason, find_pending_reason
from finetune_operator.failures.create_rejections import find_permanent_rejection
from finetune_operator.observation.pods import Observation, RejectedCreate
from testing.builders.jobs import NOW, RawBody, build_observation, job, pod, running_pod

JOB = job()
QUOTA = RejectedCreate("Pod", "bert-0-0", 403, "exceeded quota: gpus")


def waiting_pod(node_rank: int, reason: str, message: str = "") -> RawBody:
    """Return a pod whose container is waiting with this reason."""
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(JOB, node_rank, containerStatuses=[{"name": "trainer", "state": state}])


def unschedulable_pod(node_rank: int) -> RawBody:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}
    return pod(JOB, node_rank, conditions=[scheduled])


def rejected_pod(node_rank: int, reason: str, message: str) -> RawBody:
    """Return a pod whose scheduler has written this reason and message."""
    return pod(
        JOB, node_rank, conditions=[{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]
    )


def scheduled_pod(node_rank: int, ready_status: str = "", state: RawBody | None = None) -> RawBody:
    """Return a pod scheduled at NOW whose condition PodReadyToStartContainers has the status `ready_status`."""
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": NOW.isoformat()}]
    if ready_status:
        conditions.append({**conditions[0], "type": "PodReadyToStartContainers", "status": ready_status})
    statuses = [{"name": "trainer", "state": state or {"waiting": {"reason": "ContainerCreating"}}}]
    return pod(JOB, node_rank, conditions=conditions, containerStatuses=statuses)


def find_pending_reason_for_pods(
    *pods: RawBody, rejected_creates: tuple[RejectedCreate, ...] = (), now: datetime = NOW
) -> PendingReason | None:
    observation = build_observation(JOB, *pods, rejected_creates=rejected_creates)
    return find_pending_reason(JOB, observation, observation.nodes_of_attempt(0), now)


def get_reason_for_pods(*pods: RawBody, rejected_creates: tuple[RejectedCreate, ...] = ()) -> str:
    pending = find_pending_reason_for_pods(*pods, rejected_creates=rejected_creates)
    assert pending is not None
    return pending.reason


def test_a_pod_without_waiting_state_has_no_pending_reason() -> None:
    assert find_pending_reason_for_pods(pod(JOB, 0), running_pod(JOB, 1)) is None
    assert find_pending_reason_for_pods() is None


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        pytest.param(
            "ErrImagePull",
            PendingReason(
                "ImagePullFailed",
                "bert-0-0: no such tag; check spec.image and spec.imagePullSecrets",
                is_image_pull_error=True,
            ),
            id="image not found",
        ),
        pytest.param(
            "InvalidImageName",
            PendingReason(
                "ImagePullFailed",
                "bert-0-0: no such tag; check spec.image and spec.imagePullSecrets",
                is_image_pull_error=True,
                permanent=True,
            ),
            id="invalid image name",
        ),
        pytest.param(
            "CreateContainerConfigError",
            PendingReason("ConfigMissing", "bert-0-0: no such tag; create what is missing and the pod starts"),
            id="missing secret or key",
        ),
        pytest.param(
            "CrashLoopBackOff",
            PendingReason("CrashLoopBackOff", "bert-0-0: no such tag"),
            id="other reason of Kubernetes",
        ),
    ],
)
def test_message_for_a_waiting_container_contains_the_object_and_the_remedy(
    reason: str, expected: PendingReason
) -> None:
    assert find_pending_reason_for_pods(waiting_pod(0, reason, "no such tag"), running_pod(JOB, 1)) == expected


NOT_FOUND = 'failed to resolve reference "example.com/none:1": example.com/none:1: not found'
BACK_OFF = 'Back-off pulling image "example.com/none:1"'


def find_image_pull_reason(
    message: str, *, reported_message: str = "", reason: str = "ImagePullBackOff"
) -> PendingReason:
    """Return the pending reason of a pod with this image pull message, given the message in the status."""
    status = (
        JobStatus(waiting=WaitStatus(reason="ImagePullFailed", message=reported_message, since=NOW))
        if reported_message
        else JobStatus()
    )
    ftjob = job(status=status)
    observation = build_observation(ftjob, waiting_pod(0, reason, message), running_pod(ftjob, 1))
    pending = find_pending_reason(ftjob, observation, observation.nodes_of_attempt(0), NOW)
    assert pending is not None
    return pending


@pytest.mark.parametrize(
    ("message", "is_transient"),
    [
        (NOT_FOUND, False),
        ("pull access denied: failed to authorize: unexpected status: 401 Unauthorized", False),
        ("dial tcp: lookup registry.exampel.com: no such host", False),
        # from namespacelabs/foundation #846, rook #13567, containerd #8971, docker/hub-feedback #2082, cri-o #189
        ("unexpected status code https://registry-1.docker.io/v2/x/manifests/y: 429 Too Many Requests", True),
        ('Get "https://quay.io/v2/": dial tcp 3.216.1.2:443: i/o timeout', True),
        ("httpReadSeeker: failed open: failed to do request: Get https://harbor.example/v2/x: EOF", True),
        ("unexpected status from HEAD request to https://registry-1.docker.io/v2/x: 503 Service Unavailable", True),
        ("rpc error: code = 4 desc = context deadline exceeded", True),
        ("failed to extract layer: write /var/lib/containerd/x: no space left on device", True),
    ],
)
def test_registry_outages_are_retried_without_a_timeout(message: str, is_transient: bool) -> None:
    for kubelet_message in (message, f"{BACK_OFF}: ErrImagePull: {message}"):
        pending = find_image_pull_reason(kubelet_message)
        assert (pending.is_image_pull_error, pending.has_no_timeout) == (not is_transient, is_transient)
        assert message in pending.message
        assert ("check spec.image" in pending.message) is not is_transient


def test_image_pull_back_off_keeps_the_message_with_the_cause() -> None:
    for cause in (NOT_FOUND, "dial tcp 10.0.0.1:443: connect: connection refused"):
        first = find_image_pull_reason(cause, reason="ErrImagePull")
        assert find_image_pull_reason(BACK_OFF, reported_message=first.message) == first
    assert find_image_pull_reason(BACK_OFF).message.startswith("bert-0-0: ImagePullBackOff; check spec.image")


DISK_FULL = "failed to register layer: write /x.rpm: no space left on device"


def test_verdict_on_a_full_kubernetes_node_is_kept_during_back_off() -> None:
    disk_full = find_image_pull_reason(DISK_FULL, reason="ErrImagePull")
    back_off = find_image_pull_reason(BACK_OFF, reported_message=disk_full.message)
    for pending_reason in (disk_full, back_off):
        assert pending_reason.verdict is not None
        assert (pending_reason.reason, pending_reason.verdict.reason, pending_reason.timeout) == (
            "ImagePullFailed",
            "ContainerRuntimeError",
            CREATE_CONTAINER_TIMEOUT,
        )
    assert back_off.message == disk_full.message
    assert disk_full.message == f"bert-0-0 on gpu-0: {DISK_FULL}; its kubelet retries"


def test_image_error_without_a_message_is_reported_with_its_reason() -> None:
    pending = find_pending_reason_for_pods(waiting_pod(0, "ImagePullBackOff"))
    assert pending is not None
    assert pending.message.startswith("bert-0-0: ImagePullBackOff; ")


def test_message_contains_the_number_of_unschedulable_pods() -> None:
    assert find_pending_reason_for_pods(unschedulable_pod(0), running_pod(JOB, 1)) == PendingReason(
        "Unschedulable", "1 of 2 pods cannot be placed: 0/3 nodes fit"
    )
    assert find_pending_reason_for_pods(unschedulable_pod(0), unschedulable_pod(1)) == PendingReason(
        "Unschedulable", "2 of 2 pods cannot be placed: 0/3 nodes fit"
    )


@pytest.mark.parametrize(
    ("pods", "reason"),
    [
        pytest.param(
            (unschedulable_pod(0), waiting_pod(1, "CreateContainerConfigError")),
            "ConfigMissing",
            id="config before unschedulable",
        ),
        pytest.param(
            (waiting_pod(0, "CreateContainerConfigError"), waiting_pod(1, "ErrImagePull")),
            "ImagePullFailed",
            id="image before config",
        ),
        pytest.param(
            (unschedulable_pod(0), waiting_pod(1, "ErrImagePull")), "ImagePullFailed", id="image before unschedulable"
        ),
    ],
)
def test_reason_that_requires_user_action_is_reported_first(pods: tuple[RawBody, ...], reason: str) -> None:
    assert get_reason_for_pods(*pods) == get_reason_for_pods(*reversed(pods)) == reason


def test_an_invalid_image_name_is_reported_before_a_missing_image() -> None:
    pending = find_pending_reason_for_pods(waiting_pod(0, "ErrImagePull"), waiting_pod(1, "InvalidImageName"))
    assert pending is not None
    assert pending.permanent


def test_a_rejected_create_is_reported_before_waiting_containers() -> None:
    assert find_pending_reason_for_pods(waiting_pod(0, "ErrImagePull"), rejected_creates=(QUOTA,)) == PendingReason(
        "CreateRefused", "Pod bert-0-0: exceeded quota: gpus"
    )


def test_job_waits_for_terminating_children_of_a_predecessor() -> None:
    rejected = RejectedCreate(
        "Pod",
        "bert-0-0",
        409,
        "Pod bert-0-0 of a deleted job of the same name is still there",
        predecessor_terminating=True,
    )
    assert find_permanent_rejection(JOB, build_observation(JOB, rejected_creates=(rejected,))) is None
    assert find_pending_reason_for_pods(rejected_creates=(rejected,)) == PendingReason(
        "PredecessorTerminating", f"{rejected.message}; waiting until it is deleted"
    )


def test_deleted_pod_has_no_pending_reason() -> None:
    observation = Observation(nodes=build_observation(JOB, tombstones=(waiting_pod(0, "ErrImagePull"),)).nodes)
    assert len(observation.nodes) == 1
    assert find_pending_reason(JOB, observation, observation.nodes, NOW + timedelta(hours=1)) is None


@pytest.mark.parametrize(
    ("ready_status", "expected"),
    [
        pytest.param("False", ("VolumesNotReady", "its volumes or network are not ready", False), id="mounting"),
        pytest.param(
            "True", ("ContainerCreating", "its image is being pulled, or an init container runs", True), id="pulling"
        ),
        pytest.param(
            "",
            ("ContainerCreating", "its image is being pulled, or an init container runs", True),
            id="old kubelet without the condition",
        ),
    ],
)
def test_container_creation_longer_than_a_minute_is_reported(
    ready_status: str, expected: tuple[str, str, bool]
) -> None:
    pods = (scheduled_pod(0, ready_status), running_pod(JOB, 1))
    assert find_pending_reason_for_pods(*pods, now=NOW + timedelta(seconds=59)) is None
    pending = find_pending_reason_for_pods(*pods, now=NOW + timedelta(seconds=60))
    reason, text, is_expected = expected
    hint = "see kubectl describe pod bert-0-0"
    assert pending == PendingReason(reason, f"bert-0-0 on gpu-0: {text}; {hint}", expected=is_expected)


def test_pod_waiting_for_volumes_is_reported_before_an_image_pull() -> None:
    one_hour_later = NOW + timedelta(hours=1)
    pending = find_pending_reason_for_pods(scheduled_pod(0, "True"), scheduled_pod(1, "False"), now=one_hour_later)
    assert pending is not None
    assert pending.message.startswith("bert-0-1 on gpu-1: its volumes")
    assert find_pending_reason_for_pods(
        scheduled_pod(0, "True"), unschedulable_pod(1), now=one_hour_later
    ) == find_pending_reason_for_pods(unschedulable_pod(1))


def test_message_contains_the_image_of_an_injected_init_container() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}
    body = pod(JOB, 0, initContainerStatuses=[{"name": "istio-init", "state": waiting}])

    pending = find_pending_reason_for_pods(body)

    assert pending is not None
    assert pending.message == "bert-0-0: no such tag; check the image of istio-init and spec.imagePullSecrets"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        pytest.param(
            "Schedulable",
            "Pod default/bert-0-0 can possibly be assigned to gpu-0, once minAvailable is satisfied",
            id="Volcano",
        ),
        pytest.param(
            "Unschedulable",
            "0/1 nodes are available: 1 optimistic rejection in PostFilter.",
            id="Coscheduling, another pod does not fit",
        ),
        pytest.param(
            "Unschedulable",
            "0/1 nodes are available: 1 rejection in Unreserve.",
            id="Coscheduling, another pod timed out",
        ),
        pytest.param(
            "Unschedulable",
            "pod group is unschedulable, waiting for minCount pods from a gang to be scheduled",
            id="PodGroup of Kubernetes 1.36",
        ),
    ],
)
def test_pod_without_room_explains_why_its_group_waits(reason: str, message: str) -> None:
    """A pod that waits only for the others of its group does not contain the cause."""
    fitting = rejected_pod(0, reason, message)
    cause = rejected_pod(1, "Unschedulable", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")

    for pods in ((fitting, cause), (cause, fitting)):
        assert find_pending_reason_for_pods(*pods) == PendingReason(
            "Unschedulable", "1 of 2 pods cannot be placed: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        )


def test_group_in_which_every_pod_fits_is_unschedulable() -> None:
    message = "Pod default/bert-0-0 can possibly be assigned to gpu-0, once resource is released"

    assert find_pending_reason_for_pods(rejected_pod(0, "Schedulable", message)) == PendingReason(
        "Unschedulable", f"1 of 2 pods cannot be placed: {message}"
    )


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("OverLimit: team's quota has reached the allowable limit of GPUs", id="queue of KAI"),
        pytest.param("pod group is not ready, 2 Pending, 2 minAvailable", id="Volcano"),
    ],
)
def test_message_of_the_scheduler_is_shown(message: str) -> None:
    pods = [rejected_pod(rank, "Unschedulable", message) for rank in (0, 1)]

    assert find_pending_reason_for_pods(*pods) == PendingReason(
        "Unschedulable", f"2 of 2 pods cannot be placed: {message}"
    )
