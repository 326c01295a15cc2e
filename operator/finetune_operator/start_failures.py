"""Rules for containers that never ran: the kubelet refused the pod, or its runtime could not make or start them."""

import re
from dataclasses import replace

from finetune_api.reasons import Reason
from finetune_api.status import Evidence
from finetune_operator.verdict import Verdict, first_line, where

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
_INTRODUCTION = re.compile("stderr: |container process: |container init: ")
START_ERRORS = frozenset({"StartError", "ContainerCannotRun"})
CREATE_ERROR, CONFIG_ERROR = "CreateContainerError", "CreateContainerConfigError"
_WRONG_USER = re.compile(r"runAsNonRoot|non-root policy|non-numeric user")
_IMAGES_FAULT = re.compile(r'exec: \\*"|exec format error|chdir to cwd')
_RUNTIMES_FAULT = (
    (Reason.DRIVER_MISMATCH, re.compile(r"nvidia-container-cli(\.real)?: requirement error")),
    (Reason.GPU_UNAVAILABLE, re.compile(r"nvidia-container|nvml error|CDI devices?\b", re.IGNORECASE)),
    (
        Reason.CONTAINER_RUNTIME_ERROR,
        re.compile(
            r"cgroup|sd-bus|resource temporarily unavailable|cannot allocate memory|no space left|too many open files"
            r"|deadline exceeded|device or resource busy|ttrpc|transport is closing|error reading from server"
            r"|name [^:]*is reserved|input/output error|read-only file system"
        ),
    ),
)


def not_admitted(evidence: Evidence) -> Verdict | None:
    """The kubelet had no room after all: another placement will do."""
    rejected = evidence.exit_code is None and evidence.message.startswith("Pod was rejected")
    if not rejected and not evidence.reason.startswith("OutOf") and evidence.reason not in ADMISSION_ERRORS:
        return None
    said = f": {first_line(evidence.message)}" if evidence.message else ""
    return Verdict(Reason.NODE_REFUSED_POD, f"{where(evidence)}: the kubelet refused the pod: {evidence.reason}{said}")


def runtime_failed(evidence: Evidence) -> Verdict | None:
    """What runs containers on that machine is broken, or its GPUs are; another machine's may not be."""
    if evidence.reason not in START_ERRORS | {CREATE_ERROR} or _IMAGES_FAULT.search(evidence.message):
        return None
    found = (reason for reason, words in _RUNTIMES_FAULT if words.search(evidence.message))
    reason = next(found, None)
    if reason is None:
        return None
    said = _INTRODUCTION.split(evidence.message.strip())[-1]
    return Verdict(reason=reason, message=f"{where(evidence)}: the container could not start: {said}")


def cannot_start(evidence: Evidence) -> Verdict | None:
    """The image has no such entrypoint."""
    if evidence.reason not in START_ERRORS:
        return None
    said = f"{first_line(evidence.message)}; check spec.image"
    if '"python3"' in evidence.message:  # of command mode; the trainer's own image has an entrypoint
        said = "spec.image has no python3 on its PATH, which command mode needs (3.9 or newer)"
    return Verdict(
        reason=Reason.START_ERROR,
        message=f"{where(evidence)}: the container could not start: {said}",
    )


def not_made(evidence: Evidence) -> Verdict | None:
    """Of a container that a kubelet cannot make, and tries to again: what it comes to if that lasts.

    None where something that is missing may still appear.
    """
    said = f"{where(evidence)}: the container could not be made: {first_line(evidence.message)}"
    if evidence.reason == CONFIG_ERROR and _WRONG_USER.search(evidence.message):
        advice = "the security context in spec.podTemplate asks for a user that it forbids, or that the image lacks"
        verdict = Verdict(Reason.INVALID_SPEC, f"{said}; {advice}")
    elif evidence.reason != CREATE_ERROR:
        return None
    elif "no command specified" in evidence.message:
        verdict = Verdict(Reason.START_ERROR, f"{said}; check spec.image")
    else:
        verdict = runtime_failed(evidence) or Verdict(Reason.UNEXPLAINED, said)
    return replace(verdict, evidence=evidence)
