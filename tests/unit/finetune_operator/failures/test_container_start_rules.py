"""Containers that never ran: whose fault it was, by the words of kubelets and container runtimes."""

import pytest

from benchmarks.container_starts import is_wrong
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.container_start_rules import not_made
from finetune_operator.failures.rules import judge_node
from testing.corpus.error_corpus import Start, read_starts

OCI = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed:"
    " unable to start container process: error during container init: "
)
HOOK = "error running prestart hook #0: exit status 1, stdout: , stderr: Auto-detected mode as 'legacy'\n"


def not_started(message: str) -> Evidence:
    return Evidence(
        node_rank=1, k8s_node="gpu-7", ended=True, reason="StartError", exit_code=128, message=OCI + message
    )


def test_an_image_without_python_is_told_in_those_words() -> None:
    said = 'exec: "python3": executable file not found in $PATH: unknown'
    verdict = judge_node(not_started(said))
    assert (verdict.reason, verdict.action) == ("StartError", FailureAction.FAIL)
    assert "spec.image has no python3 on its PATH" in verdict.message


@pytest.mark.parametrize(
    "message",
    [
        pytest.param('exec: "train.sh": executable file not found in $PATH: unknown', id="no such program"),
        pytest.param("exec /bin/train: exec format error", id="another processor's"),
        pytest.param(
            'chdir to cwd ("/none") set in config.json failed: no such file or directory', id="no such folder"
        ),
    ],
)
def test_an_image_that_cannot_be_started_is_the_users(message: str) -> None:
    verdict = judge_node(not_started(message))
    assert (verdict.reason, verdict.action) == (Reason.START_ERROR, FailureAction.FAIL)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        # NVIDIA/nvidia-docker #1252, #1505, #1280, k8s-device-plugin #98, #1400
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
        # goharbor/harbor #15944, clearcontainers/runtime #642, cri-o #9082
        ("fork/exec /proc/24330/exe: resource temporarily unavailable: unknown", "ContainerRuntimeError"),
        ("write /sys/fs/cgroup/cpu/kubepods/tasks: no space left on device", "ContainerRuntimeError"),
        ("sd-bus call: Unit kubepods-burstable.slice not found.: I/O error", "ContainerRuntimeError"),
    ],
)
def test_a_machine_that_cannot_start_containers_is_no_fault_of_the_job(message: str, reason: str) -> None:
    for words in (message, HOOK + message):
        verdict = judge_node(not_started(words))
        assert (verdict.reason, verdict.fault, verdict.action) == (reason, "infrastructure", FailureAction.RESTART)
        assert verdict.message.startswith("node 1 (gpu-7): the container could not start: ")
        assert verdict.message.endswith(message)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("OutOfnvidia.com/gpu", "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu"),
        ("TopologyAffinityError", "Pod Resources cannot be allocated with Topology locality"),
        ("NodeShutdown", "Pod was rejected as the node is shutting down."),
        ("SomethingNew", "Pod was rejected: for a reason of the next release"),
    ],
)
def test_a_pod_that_its_kubelet_refused_is_tried_elsewhere(reason: str, message: str) -> None:
    verdict = judge_node(Evidence(node_rank=1, k8s_node="gpu-7", ended=True, reason=reason, message=message))
    assert (verdict.reason, verdict.action) == (Reason.NODE_REFUSED_POD, FailureAction.RESTART)


SECCOMP = 'cannot load seccomp profile "/var/lib/kubelet/seccomp/none.json": open none.json: no such file or directory'
MAKE, CONFIG = "CreateContainerError", "CreateContainerConfigError"


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        # containerd #4604, cri-o #8596, #7263, dra-driver-nvidia-gpu #736
        (MAKE, 'failed to reserve container name "a_0": name "a_0" is reserved for "7c54"', "ContainerRuntimeError"),
        (MAKE, "error reserving ctr name a_0 for id 77d1: name is reserved", "ContainerRuntimeError"),
        (MAKE, "context was either canceled or the deadline exceeded", "ContainerRuntimeError"),
        (MAKE, "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=0", "GpuUnavailable"),
        # seen with containerd 2.2
        (MAKE, 'failed to generate container "a2d4" spec: failed to generate spec: no command specified', "StartError"),
        (MAKE, f"failed to create containerd container: {SECCOMP}", "Unexplained"),
        (CONFIG, "container's runAsUser breaks non-root policy", "InvalidSpec"),
        # harbor-operator #82
        (CONFIG, "container has runAsNonRoot and image will run as root", "InvalidSpec"),
        (CONFIG, "container has runAsNonRoot and image has non-numeric user (nonroot)", "InvalidSpec"),
    ],
)
def test_a_container_that_no_kubelet_can_make_is_judged_by_its_words(reason: str, message: str, expected: str) -> None:
    verdict = not_made(Evidence(node_rank=1, k8s_node="gpu-7", reason=reason, message=message))
    assert verdict is not None
    assert verdict.reason == expected
    assert verdict.message.startswith("node 1 (gpu-7): the container could not ")
    assert message in verdict.message
    assert verdict.evidence is not None


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "RunContainerError", "Unschedulable"])
def test_what_may_still_appear_is_no_failure(reason: str) -> None:
    assert not_made(Evidence(node_rank=0, reason=reason, message='secret "token" not found')) is None


@pytest.mark.parametrize("message", ["", "something that the next runtime says"])
def test_words_that_nobody_knows_are_nobodys_fault(message: str) -> None:
    verdict = judge_node(Evidence(node_rank=1, ended=True, reason="StartError", exit_code=128, message=message))
    assert (verdict.reason, verdict.action) == ("Unexplained", FailureAction.RESTART)
    assert "check spec.image" in verdict.message


def test_a_pod_that_a_node_under_pressure_does_not_admit_is_no_eviction_for_its_own_use() -> None:
    refused, passed = (
        judge_node(Evidence(node_rank=0, ended=True, reason="Evicted", message=message))
        for message in (
            "The node had condition: [DiskPressure]. ",
            "Pod ephemeral local storage usage exceeds the total limit",
        )
    )
    assert (refused.reason, refused.action) == ("NodeRefusedPod", FailureAction.RESTART)
    assert (passed.reason, passed.action) == ("Evicted", FailureAction.FAIL)


@pytest.mark.parametrize("entry", read_starts(held_out=False), ids=lambda entry: f"{entry.label}-{entry.source}")
def test_of_real_texts_no_users_error_is_retried_and_no_other_fails(entry: Start) -> None:
    wrong = "retried" if entry.source == "cilium/cilium#32198" else ""  # an AppArmor profile: twice, then never
    assert is_wrong(entry) == wrong
