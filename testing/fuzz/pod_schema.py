"""Schema of the metadata and status of a pod, as far as the operator reads them.

Types and times are those that the API server guarantees; the texts may come from any kubelet, controller or tenant.
"""

from typing import Any

from finetune_operator import names

Schema = dict[str, Any]

INT32 = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
INT64 = {"type": "integer"}
TIME = {"type": "string", "format": "date-time"}
TEXT = {"type": "string"}


def _build_object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


def _build_list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "maxItems": 8}


def _suggest(*examples: str) -> Schema:
    return {"type": "string", "examples": examples}


CONDITION = _build_object(
    type=_suggest("PodScheduled", "DisruptionTarget", "TerminationTarget", "PodReadyToStartContainers", "Ready"),
    status=_suggest("True", "False", "Unknown"),
    reason=_suggest(
        "Unschedulable", "SchedulingGated", "EvictionByEvictionAPI", "PreemptionByScheduler", "DeletionByTaintManager",
        "TerminationByKubelet", "WorkloadEvictedDueToPreempted", "DeletionByPodGC",
    ),
    message=TEXT,
    lastTransitionTime=TIME,
)  # fmt: skip
CONTAINER_STATE = _build_object(
    running=_build_object(startedAt=TIME),
    waiting=_build_object(
        reason=_suggest(
            "ContainerCreating", "PodInitializing", "CrashLoopBackOff", "ErrImagePull", "ImagePullBackOff",
            "CreateContainerConfigError", "CreateContainerError", "InvalidImageName", "RunContainerError",
        ),
        message=TEXT,
    ),
    terminated=_build_object(
        exitCode=INT32,
        signal=INT32,
        reason=_suggest("Completed", "Error", "OOMKilled", "StartError", "ContainerStatusUnknown"),
        message=TEXT,
        startedAt=TIME,
        finishedAt=TIME,
    ),
)  # fmt: skip
CONTAINER_STATUS = {
    **_build_object(
        name=_suggest(names.CONTAINER, "init", "sidecar"),
        state=CONTAINER_STATE,
        lastState=CONTAINER_STATE,
        restartCount=INT32,
        imageID=TEXT,
    ),
    "required": ["name"],
}
STATUS = _build_object(
    phase={"enum": ["Pending", "Running", "Succeeded", "Failed", "Unknown"]},
    reason=_suggest("Evicted", "NodeLost", "Preempting", "UnexpectedAdmissionError", "OutOfcpu", "DeadlineExceeded"),
    message=TEXT,
    podIP=_suggest("10.0.0.7", "fd00::7"),
    conditions=_build_list(CONDITION),
    containerStatuses=_build_list(CONTAINER_STATUS),
    initContainerStatuses=_build_list(CONTAINER_STATUS),
)
OWNER = {
    **_build_object(
        kind=_suggest(names.FINETUNEJOB_KIND, "Job"), name=_suggest("bert"), uid=TEXT, controller={"type": "boolean"}
    ),
    "required": ["kind", "name", "uid"],
}
# Fields that any client can set in a pod that it creates, apart from the deletion times.
METADATA = _build_object(
    labels={"type": "object", "additionalProperties": TEXT},
    ownerReferences=_build_list(OWNER),
    deletionTimestamp=TIME,
    deletionGracePeriodSeconds=INT64,
)
