"""Rules for containers that never ran: the kubelet refused the pod, or its runtime could not make or start them."""

import re

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.verdict import Verdict, first_line, where

# of kubelets; those of newer releases say, of whatever kind, that the pod "was rejected"
ADMISSION_ERRORS = frozenset(
    {
        "NodeAffinity",
        "NodeShutdown",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
        "VolumeAttachmentLimitExceeded",
    }
)
START_ERRORS = frozenset({"StartError", "ContainerCannotRun"})
CREATE_ERROR, CONFIG_ERROR = "CreateContainerError", "CreateContainerConfigError"
_INTRODUCTION = re.compile("stderr: |container process: |container init: ")
_OWN_PROGRAMS = "containerd|runc|crun|apparmor_parser|nvidia-"  # of the machine; an image's are of its user
_WORDS = (  # the first that match tell; where none do, nobody knows whose fault it was
    (Reason.DRIVER_MISMATCH, r"nvidia-container-cli(\.real)?: requirement error"),
    (Reason.GPU_UNAVAILABLE, r"nvidia-container|nvml error|CDI devices?\b|/dev/nvidia|nvidiactl"),
    (Reason.INVALID_SPEC, r"runAsNonRoot|non-root policy|non-numeric user|unknown capability"),
    (
        Reason.START_ERROR,
        rf'exec: \\*"(?!{_OWN_PROGRAMS})|exec format error|chdir to cwd|no command specified'
        r"|to rootfs at .*: not a directory",
    ),
    (
        Reason.CONTAINER_RUNTIME_ERROR,
        r"cgroup|sd-bus|resource temporarily unavailable|cannot allocate memory|no space left|too many open files"
        r"|deadline exceeded|device or resource busy|ttrpc|transport is closing|error reading from server"
        rf'|exec: \\*"({_OWN_PROGRAMS})|retrieve OCI runtime error|hook #\d|failed to extract layer|content store'
        r"|name [^:]*is reserved|input/output error|read-only file system|writing file|mount rootfs",
    ),
)
_ADVICE = {
    Reason.INVALID_SPEC: "; the security context in spec.podTemplate asks for what is forbidden, or not known",
    Reason.START_ERROR: "; check spec.image",
    Reason.UNEXPLAINED: "; check spec.image, and the machine if others start there",
}


def not_admitted(evidence: Evidence) -> Verdict | None:
    """The kubelet had no room after all: another placement will do."""
    rejected = evidence.exit_code is None and evidence.message.startswith("Pod was rejected")
    rejected = rejected or under_pressure(evidence)
    if not rejected and not evidence.reason.startswith("OutOf") and evidence.reason not in ADMISSION_ERRORS:
        return None
    said = f": {first_line(evidence.message)}" if evidence.message else ""
    return Verdict(Reason.NODE_REFUSED_POD, f"{where(evidence)}: the kubelet refused the pod: {evidence.reason}{said}")


def under_pressure(evidence: Evidence) -> bool:
    """Not admitted because the node is short of something; a kubelet calls that an eviction, too."""
    return evidence.reason == "Evicted" and "The node had condition" in evidence.message


def not_started(evidence: Evidence) -> Verdict | None:
    """The container never ran: what the image, the spec, the machine or its GPUs have to do with it is in the words."""
    if evidence.reason not in START_ERRORS:
        return None
    reason, said = _tell(evidence)
    # of command mode; the trainer's own image has an entrypoint
    if reason is Reason.START_ERROR and '"python3"' in evidence.message:
        said = "spec.image has no python3 on its PATH, which command mode needs (3.9 or newer)"
    return Verdict(reason, f"{where(evidence)}: the container could not start: {said}")


def not_made(evidence: Evidence) -> Verdict | None:
    """Of a container that a kubelet cannot make, and tries to again: what it comes to if that lasts.

    None where something that is missing may still appear.
    """
    reason, said = _tell(evidence)
    if evidence.reason != CREATE_ERROR and (evidence.reason, reason) != (CONFIG_ERROR, Reason.INVALID_SPEC):
        return None
    return Verdict(reason, f"{where(evidence)}: the container could not be made: {said}", evidence=evidence)


def _tell(evidence: Evidence) -> tuple[Reason, str]:
    found = (reason for reason, words in _WORDS if re.search(words, evidence.message, re.IGNORECASE))
    reason = next(found, Reason.UNEXPLAINED)
    said = _INTRODUCTION.split(evidence.message.strip())[-1] or "its runtime gives no reason"
    return reason, f"{first_line(said)}{_ADVICE.get(reason, '')}"
