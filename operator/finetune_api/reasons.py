"""Every reason that a condition, attempt or event may give: whose fault it tells of, and what it means."""

from enum import StrEnum
from typing import Self

from finetune_api.status import Fault


class Reason(StrEnum):
    """A stable CamelCase word. Those of failures carry the fault, by which restart budgets are kept."""

    fault: Fault | None
    meaning: str

    def __new__(cls, word: str, fault: Fault | None = None, meaning: str = "") -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.fault = fault
        member.meaning = meaning
        return member

    QUEUED = "Queued", None, "No attempt was begun yet."
    STARTING = "Starting", None, "The attempt's pods are being made or do not all run yet."
    RESTARTING = "Restarting", None, "The same, after a failure that the message names."
    RUNNING = "Running", None, "Every node of the attempt runs."
    STOPPING = "Stopping", None, "The attempt's pods are being stopped; the verdict follows when none is left."
    SUSPENDING = "Suspending", None, "`spec.suspend` is set; checkpoints are being saved and pods released."
    SUSPENDED = "Suspended", None, "`spec.suspend` is set and every pod is released."
    RESUMED = "Resumed", None, "A suspended job goes on with the next attempt."
    ACTIVE = "Active", None, "The job is not suspended."
    COMPLETED = (
        "Completed",
        None,
        "Every node succeeded: the result is published, or every node's command ended with exit 0.",
    )

    UNSCHEDULABLE = "Unschedulable", None, "No Kubernetes node has room or fits; waited for, no attempt is spent."
    CONFIG_MISSING = "ConfigMissing", None, "A ConfigMap or Secret that the pod names is missing; waited for."
    CREATE_REFUSED = "CreateRefused", None, "Quota or policy forbids a pod or Service; tried again until it is allowed."
    IMAGE_PULL_FAILED = (
        "ImagePullFailed",
        Fault.USER,
        "The image cannot be had; waited for ten minutes, an invalid name not at all. Check `spec.image` and "
        "`spec.imagePullSecrets`.",
    )

    DEADLINE_EXCEEDED = "DeadlineExceeded", Fault.USER, "The job was active for longer than `activeDeadlineSeconds`."
    PENDING_DEADLINE_EXCEEDED = (
        "PendingDeadlineExceeded",
        Fault.USER,
        "The nodes did not all run within `pendingDeadlineSeconds`; the message says what they waited for.",
    )
    INVALID_SPEC = "InvalidSpec", Fault.USER, "The spec contradicts itself, the cluster's storage or the model."
    NAME_TAKEN = "NameTaken", Fault.USER, "A Service, ConfigMap or pod of the job's names belongs to somebody else."
    DATASET_ERROR = (
        "DatasetError",
        Fault.USER,
        "Rows are missing or malformed; the message names file, line and column.",
    )
    CHAT_TEMPLATE_ERROR = "ChatTemplateError", Fault.USER, "The tokenizer's chat template cannot render a conversation."
    MODEL_NOT_FOUND = "ModelNotFound", Fault.USER, "No such path, or no such model on the Hub that this job may read."
    MODEL_ERROR = "ModelError", Fault.USER, "The model's files cannot be loaded."
    OUTPUT_ERROR = "OutputError", Fault.USER, "The output belongs to another job, cannot be written, or is not shared."
    CHECKPOINT_CORRUPT = "CheckpointCorrupt", Fault.USER, "There are checkpoints, but none of them is whole."
    NON_FINITE_LOSS = "NonFiniteLoss", Fault.USER, "The loss became NaN or infinite; the message names the step."
    WORLD_SIZE_MISMATCH = "WorldSizeMismatch", Fault.USER, "torchrun started another number of ranks than was promised."
    MIXED_HARDWARE = (
        "MixedHardware",
        Fault.USER,
        "Ranks have different GPUs, drivers or versions; choose nodes of one kind, or set "
        "`training.allowMixedHardware`.",
    )
    USER_CODE_ERROR = "UserCodeError", Fault.USER, "A rank raised an exception that a restart would raise again."
    START_ERROR = "StartError", Fault.USER, "The container's entrypoint cannot be run; check `spec.image`."

    DEVICE_ASSERT = (
        "DeviceAssert",
        Fault.USER,
        "An assertion failed on the GPU, mostly a token id or label that is out of range.",
    )
    HUB_UNAUTHORIZED = "HubUnauthorized", Fault.USER, "The Hub lets this job's token, or the lack of one, not read it."
    IMAGE_BROKEN = "ImageBroken", Fault.USER, "Libraries of the image do not fit together; rebuild it."

    SHARED_MEMORY_EXHAUSTED = (
        "SharedMemoryExhausted",
        Fault.RESOURCE,
        "Shared memory is too small for the data loaders or NCCL.",
    )
    DISK_FULL = "DiskFull", Fault.RESOURCE, "A volume is full or its quota is spent."
    CUDA_OUT_OF_MEMORY = "CudaOutOfMemory", Fault.RESOURCE, "A GPU ran out of memory; the same batch would again."
    HOST_OUT_OF_MEMORY = "HostOutOfMemory", Fault.RESOURCE, "The container passed its memory limit."
    EVICTED = "Evicted", Fault.RESOURCE, "The pod passed its own limits of ephemeral storage."

    GPU_HARDWARE = "GpuHardware", Fault.INFRASTRUCTURE, "A GPU is broken: memory errors, NVLink, or fallen off the bus."
    GPU_UNAVAILABLE = "GpuUnavailable", Fault.INFRASTRUCTURE, "A Kubernetes node's GPU cannot be used."
    DRIVER_MISMATCH = (
        "DriverMismatch",
        Fault.INFRASTRUCTURE,
        "A Kubernetes node's driver does not fit the image or GPU.",
    )
    NODE_LOST = "NodeLost", Fault.INFRASTRUCTURE, "The Kubernetes node went away."
    NODE_REFUSED_POD = "NodeRefusedPod", Fault.INFRASTRUCTURE, "The kubelet had no room for the pod after all."
    GANG_INCOMPLETE = (
        "GangIncomplete",
        Fault.INFRASTRUCTURE,
        "Some nodes ran while others found no room for `startupDeadlineSeconds`; all were released, to be tried again.",
    )
    POD_DELETED = "PodDeleted", Fault.INFRASTRUCTURE, "Somebody deleted a pod while the attempt was to go on."
    STOPPED = "Stopped", Fault.INFRASTRUCTURE, "A node was asked to stop, and nothing else explains the end."
    PREEMPTED = "Preempted", Fault.PREEMPTION, "A pod was preempted, drained or evicted from its Kubernetes node."

    RANK_KILLED = "RankKilled", Fault.TRANSIENT, "A rank was ended by a signal that nobody here sent."
    CONTAINER_KILLED = "ContainerKilled", Fault.TRANSIENT, "A whole container was killed from outside."
    PEER_LOST = "PeerLost", Fault.TRANSIENT, "Ranks lost the connection to each other, and none says why."
    HANG = (
        "Hang",
        Fault.TRANSIENT,
        "Ranks gave no sign of life for too long; the message names the one that stands out.",
    )
    NETWORK_FAULT = (
        "NetworkFault",
        Fault.TRANSIENT,
        "The network between the nodes failed, by the words of NCCL or gloo.",
    )
    PORT_IN_USE = "PortInUse", Fault.TRANSIENT, "The rendezvous port was taken by another process."
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout", Fault.TRANSIENT, "The nodes did not find each other in time."
    HUB_UNAVAILABLE = "HubUnavailable", Fault.TRANSIENT, "The Hub did not answer."

    CUDA_FAULT = "CudaFault", Fault.UNKNOWN, "A kernel failed on a GPU; mostly the program's fault, seldom the GPU's."
    RANK_CRASHED = "RankCrashed", Fault.UNKNOWN, "A rank crashed in native code (SIGSEGV, SIGABRT ...)."
    NO_RESULT = "NoResult", Fault.UNKNOWN, "The node ended with exit 0 but left no result."
    UNEXPLAINED = "Unexplained", Fault.UNKNOWN, "Nothing the node left behind says why it ended."
