"""Rules for containers that the runtime could not create or start.

core.pending_reasons reports containers whose start the kubelet still retries, for example with the reason
ConfigMissing.
"""

import re

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.pattern_set import PatternSet
from finetune_operator.failures.verdict import Verdict, describe_node, extract_last_line

START_ERRORS = frozenset({"StartError", "ContainerCannotRun"})
CREATE_ERROR, CONFIG_ERROR = "CreateContainerError", "CreateContainerConfigError"
_PREFIX = re.compile("stderr: |container process: |container init: ")
# programs of the Kubernetes node; all other programs belong to the image
_HOST_PROGRAMS = "containerd|runc|crun|apparmor_parser|nvidia-"
_EXEC = r'exec: \\*"'
_PATTERNS = (  # first match applies; without a match, the fault is unknown (decisions/203)
    (Reason.DRIVER_MISMATCH, r"nvidia-container-cli(\.real)?: requirement error"),
    (Reason.GPU_UNAVAILABLE, r"nvidia-container|nvml error|CDI devices?\b|/dev/nvidia|nvidiactl"),
    (Reason.INVALID_SPEC, r"runAsNonRoot|non-root policy|non-numeric user|unknown capability"),
    (Reason.START_ERROR, _EXEC),
    (Reason.START_ERROR, r"exec format error|chdir to cwd|no command specified|to rootfs at .*: not a directory"),
    (
        Reason.CONTAINER_RUNTIME_ERROR,
        r"cgroup|sd-bus|resource temporarily unavailable|cannot allocate memory|no space left|too many open files"
        r"|deadline exceeded|device or resource busy|ttrpc|transport is closing|error reading from server"
        rf"|{_EXEC}({_HOST_PROGRAMS})|retrieve OCI runtime error|hook #\d|failed to extract layer|content store"
        r"|name [^:]*is reserved|input/output error|read-only file system|writing file|mount rootfs",
    ),
)
_PATTERN_SET = PatternSet(_PATTERNS, exceptions={_EXEC: rf"{_EXEC}({_HOST_PROGRAMS})"})
_ADVICE = {
    Reason.INVALID_SPEC: "; the security context in spec.podTemplate requests something forbidden or unknown",
    Reason.START_ERROR: "; check spec.image",
    Reason.UNEXPLAINED: "; check spec.image, and whether other pods start on that Kubernetes node",
}


def container_not_started(evidence: Evidence) -> Verdict | None:
    """Match a container that never ran; the runtime message distinguishes errors of image, spec, host and GPUs.

    An error of the container runtime, or an unknown one, may be a consequence of the deletion of the pod.
    """
    if evidence.reason not in START_ERRORS:
        return None
    reason, detail = _classify_runtime_message(evidence)
    is_deleted = evidence.deleted or evidence.outcome == Outcome.STOPPED
    if is_deleted and reason in (Reason.CONTAINER_RUNTIME_ERROR, Reason.UNEXPLAINED):
        return None
    # only possible in command mode, because the trainer image has its own entrypoint
    if reason is Reason.START_ERROR and '"python3"' in evidence.message:
        detail = "spec.image has no python3 on its PATH, which command mode needs (3.9 or newer)"
    return Verdict(reason, f"{describe_node(evidence)}: the container could not start: {detail}")


def container_create_failed(evidence: Evidence) -> Verdict | None:
    """Return the verdict that applies if the kubelet cannot create a container in any of its retries.

    Return None if the container is waiting for a missing object that a user may still create, such as a Secret.
    """
    reason, detail = _classify_runtime_message(evidence)
    if evidence.reason != CREATE_ERROR and (evidence.reason, reason) != (CONFIG_ERROR, Reason.INVALID_SPEC):
        return None
    return Verdict(
        reason, f"{describe_node(evidence)}: the container could not be created: {detail}", evidence=evidence
    )


def _classify_runtime_message(evidence: Evidence) -> tuple[Reason, str]:
    """Return the reason that matches the container runtime's message, and the last line of the message with advice."""
    reason = _PATTERN_SET.find_first(evidence.message) or Reason.UNEXPLAINED
    detail = _PREFIX.split(evidence.message.strip())[-1] or "the runtime reports no reason"
    return reason, f"{extract_last_line(detail)}{_ADVICE.get(reason, '')}"
