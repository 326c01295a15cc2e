"""Tests of verdicts on containers that never started, based on kubelet and container runtime messages."""

import pytest

from benchmarks.container_starts import find_wrong_action
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.container_start_rules import container_create_failed
from finetune_operator.failures.rules import judge_node
from testing.corpus.error_corpus import LabelledStartFailure, read_start_failures

OCI = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed:"
    " unable to start container process: error during container init: "
)
HOOK = "error running prestart hook #0: exit status 1, stdout: , stderr: Auto-detected mode as 'legacy'\n"


def start_error_evidence(message: str) -> Evidence:
    return Evidence(
        node_rank=1, k8s_node="gpu-7", ended=True, reason="StartError", exit_code=128, message=OCI + message
    )


def test_verdict_message_reports_an_image_without_python() -> None:
    message = 'exec: "python3": executable file not found in $PATH: unknown'
    verdict = judge_node(start_error_evidence(message))
    assert (verdict.reason, verdict.action) == ("StartError", FailureAction.FAIL)
    assert "spec.image has no python3 on its PATH" in verdict.message


@pytest.mark.parametrize(
    "message",
    [
        pytest.param('exec: "train.sh": executable file not found in $PATH: unknown', id="no such program"),
        pytest.param("exec /bin/train: exec format error", id="other architecture"),
        pytest.param(
            'chdir to cwd ("/none") set in config.json failed: no such file or directory', id="no such folder"
        ),
    ],
)
def test_container_start_error_caused_by_the_image_is_a_user_error(message: str) -> None:
    verdict = judge_node(start_error_evidence(message))
    assert (verdict.reason, verdict.action) == (Reason.START_ERROR, FailureAction.FAIL)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        # messages from NVIDIA/nvidia-docker #1252, #1505, #1280, k8s-device-plugin #98, #1400
        ("nvidia-container-cli: initialization error: driver error: failed to process request", "GpuUnavailable"),
        ("nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown", "GpuUnavailable"),
        ("nvidia-container-cli: detection error: nvml error: unknown error: unknown", "GpuUnavailable"),
        ("nvidia-container-cli: device error: unknown device id", "GpuUnavailable"),
        ("nvidia-container-cli: ldcache error: process /sbin/ldconfig terminated with signal 9", "GpuUnavailable"),
        ("failed to inject CDI devices: unresolvable CDI devices nvidia.com/gpu=0: unknown", "GpuUnavailable"),
        (
            "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your driver",
            "DriverMismatch",
        ),
        # messages from goharbor/harbor #15944, clearcontainers/runtime #642, cri-o #9082
        ("fork/exec /proc/24330/exe: resource temporarily unavailable: unknown", "ContainerRuntimeError"),
        ("write /sys/fs/cgroup/cpu/kubepods/tasks: no space left on device", "ContainerRuntimeError"),
        ("sd-bus call: Unit kubepods-burstable.slice not found.: I/O error", "ContainerRuntimeError"),
    ],
)
def test_container_runtime_failure_is_an_infrastructure_fault(message: str, reason: str) -> None:
    for text in (message, HOOK + message):
        verdict = judge_node(start_error_evidence(text))
        assert (verdict.reason, verdict.fault, verdict.action) == (reason, "infrastructure", FailureAction.RESTART)
        assert verdict.message.startswith("node 1 (gpu-7): the container could not start: ")
        assert verdict.message.endswith(message)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("OutOfnvidia.com/gpu", "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu"),
        ("TopologyAffinityError", "Pod Resources cannot be allocated with Topology locality"),
        ("NodeShutdown", "Pod was rejected as the node is shutting down."),
        ("SomethingNew", "Pod was rejected: a future reason"),
    ],
)
def test_a_pod_rejected_by_its_kubelet_is_restarted(reason: str, message: str) -> None:
    verdict = judge_node(Evidence(node_rank=1, k8s_node="gpu-7", ended=True, reason=reason, message=message))
    assert (verdict.reason, verdict.action) == (Reason.NODE_REFUSED_POD, FailureAction.RESTART)


SECCOMP = 'cannot load seccomp profile "/var/lib/kubelet/seccomp/none.json": open none.json: no such file or directory'
CREATE, CONFIG = "CreateContainerError", "CreateContainerConfigError"


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        # messages from containerd #4604, cri-o #8596, #7263, dra-driver-nvidia-gpu #736
        (CREATE, 'failed to reserve container name "a_0": name "a_0" is reserved for "7c54"', "ContainerRuntimeError"),
        (CREATE, "error reserving ctr name a_0 for id 77d1: name is reserved", "ContainerRuntimeError"),
        (CREATE, "context was either canceled or the deadline exceeded", "ContainerRuntimeError"),
        (CREATE, "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=0", "GpuUnavailable"),
        # message of containerd 2.2 and later
        (
            CREATE,
            'failed to generate container "a2d4" spec: failed to generate spec: no command specified',
            "StartError",
        ),
        (CREATE, f"failed to create containerd container: {SECCOMP}", "Unexplained"),
        (CONFIG, "container's runAsUser breaks non-root policy", "InvalidSpec"),
        # message from harbor-operator #82
        (CONFIG, "container has runAsNonRoot and image will run as root", "InvalidSpec"),
        (CONFIG, "container has runAsNonRoot and image has non-numeric user (nonroot)", "InvalidSpec"),
    ],
)
def test_container_creation_failure_is_classified_by_its_message(reason: str, message: str, expected: str) -> None:
    verdict = container_create_failed(Evidence(node_rank=1, k8s_node="gpu-7", reason=reason, message=message))
    assert verdict is not None
    assert verdict.reason == expected
    assert verdict.message.startswith("node 1 (gpu-7): the container could not ")
    assert message in verdict.message
    assert verdict.evidence is not None


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "RunContainerError", "Unschedulable"])
def test_missing_object_that_may_still_be_created_is_not_a_failure(reason: str) -> None:
    assert container_create_failed(Evidence(node_rank=0, reason=reason, message='secret "token" not found')) is None


@pytest.mark.parametrize("message", ["", "an unknown message of a future runtime"])
def test_unknown_message_leads_to_an_unknown_fault(message: str) -> None:
    verdict = judge_node(Evidence(node_rank=1, ended=True, reason="StartError", exit_code=128, message=message))
    assert (verdict.reason, verdict.action) == ("Unexplained", FailureAction.RESTART)
    assert "check spec.image" in verdict.message


def test_node_pressure_is_retried_but_exceeded_ephemeral_storage_is_a_failure() -> None:
    rejected, evicted = (
        judge_node(Evidence(node_rank=0, ended=True, reason="Evicted", message=message))
        for message in (
            "The node had condition: [DiskPressure]. ",
            "Pod ephemeral local storage usage exceeds the total limit",
        )
    )
    assert (rejected.reason, rejected.action) == ("NodeRefusedPod", FailureAction.RESTART)
    assert (evicted.reason, evicted.action) == ("Evicted", FailureAction.FAIL)


@pytest.mark.parametrize(
    "entry", read_start_failures(held_out=False), ids=lambda entry: f"{entry.label}-{entry.source}"
)
def test_job_fails_only_for_user_errors_of_the_corpus(entry: LabelledStartFailure) -> None:
    # an AppArmor error without an explanation is retried twice
    expected_error = "retried" if entry.source == "cilium/cilium#32198" else ""
    assert find_wrong_action(entry) == expected_error
