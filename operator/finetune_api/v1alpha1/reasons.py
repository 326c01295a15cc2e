"""Reasons of conditions, attempts and events; failure reasons also have a fault and advice."""

from enum import StrEnum
from typing import Self

from finetune_api.v1alpha1.status import Fault


class FailureAction(StrEnum):
    """Action that the operator takes after a failure if the restart budget allows it."""

    RESTART = "Restart"
    REPAIR = "Repair"  # changes the spec, then restarts
    FAIL = "Fail"


class Reason(StrEnum):
    """Stable CamelCase reason. A failure reason also has advice and a fault, which selects the restart budget."""

    fault: Fault | None
    meaning: str
    advice: str  # remedy for the user, appended to messages

    def __new__(cls, value: str, fault: Fault | None = None, meaning: str = "", advice: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.fault = fault
        member.meaning = meaning
        member.advice = advice
        return member

    @property
    def action(self) -> FailureAction:
        """Action that the operator takes after a failure with this reason."""
        if self in (Reason.CUDA_OUT_OF_MEMORY, Reason.HOST_OUT_OF_MEMORY, Reason.SHARED_MEMORY_EXHAUSTED):
            return FailureAction.REPAIR
        return FailureAction.FAIL if self.fault in (Fault.USER, Fault.RESOURCE) else FailureAction.RESTART

    QUEUED = "Queued", None, "No attempt has started yet."
    STARTING = "Starting", None, "The pods of the attempt are being created, or not all of them are running."
    RESTARTING = "Restarting", None, "The pods of an attempt are starting after a failure, which the message describes."
    RUNNING = "Running", None, "All nodes of the attempt are running."
    STOPPING = "Stopping", None, "The pods of the attempt are being stopped; the verdict follows once all are gone."
    SUSPENDING = "Suspending", None, "`spec.suspend` is set; checkpoints are being saved and pods deleted."
    SUSPENDED = "Suspended", None, "`spec.suspend` is set and all pods are deleted."
    RESUMED = "Resumed", None, "A suspended job continues with the next attempt."
    ACTIVE = "Active", None, "The job is not suspended."
    COMPLETED = (
        "Completed",
        None,
        "Every node succeeded: the result is published, or every node's command exited with 0.",
    )

    UNSCHEDULABLE = (
        "Unschedulable",
        None,
        "No Kubernetes node fits or has free capacity. Retried; this uses no restart.",
    )
    CONFIG_MISSING = "ConfigMissing", None, "A ConfigMap or Secret that the pod references is missing. Retried."
    CREATE_CONTAINER_ERROR = (
        "CreateContainerError",
        None,
        "A kubelet cannot create a container and retries; after three minutes the attempt fails.",
    )
    WAITING_IN_QUEUE = (
        "WaitingInQueue",
        None,
        "Kueue has not admitted the job yet. The message is Kueue's; this uses no restart.",
    )
    NO_GROUP_SCHEDULER = (
        "NoGroupScheduler",
        None,
        "Nothing in the cluster can schedule the pods as a group, as `spec.scheduling` requires. Retried.",
    )
    QUEUE_IGNORED = (
        "QueueIgnored",
        Fault.USER,
        "`spec.scheduling` is set, but Kueue does not manage the pods of the namespace.",
        "let Kueue manage pods in this namespace, or remove spec.scheduling",
    )
    CREATE_REFUSED = "CreateRefused", None, "A quota, a policy or an unreachable webhook rejects an object. Retried."
    PREDECESSOR_TERMINATING = (
        "PredecessorTerminating",
        None,
        "Objects of a deleted job with the same name still exist; the job waits until they are gone.",
    )
    VOLUMES_NOT_READY = (
        "VolumesNotReady",
        None,
        "A pod is scheduled, but a volume or its network is not ready (claim, Secret, driver). Retried.",
    )
    CONTAINER_CREATING = (
        "ContainerCreating",
        None,
        "A container has been in creation for over a minute, usually because its image is being pulled.",
    )
    IMAGE_PULL_FAILED = (
        "ImagePullFailed",
        Fault.USER,
        "The image could not be pulled for ten minutes, or its name is invalid; registry outages are retried.",
        "correct spec.image or spec.imagePullSecrets",
    )

    RECONCILE_FAILED = (
        "ReconcileFailed",
        None,
        "The operator cannot reconcile the job, for example because another release wrote its spec. Its pods keep"
        " running; only `suspend`, `cancel`, `activeDeadlineSeconds`, `ttlSecondsAfterFinished` and deletion apply.",
    )
    NEWER_TRAINER_IMAGE = (
        "NewerTrainerImage",
        None,
        "The operator was upgraded and has a newer trainer image. The job keeps the image with which it began; to use"
        " the newer one, suspend the job, set `image`, and resume it.",
    )
    PERMISSION_MISSING = (
        "PermissionMissing",
        None,
        "The API server refuses the operator a right that the chart grants by default; the message names it.",
    )
    TTL_IGNORED = (
        "TtlIgnored",
        None,
        "The job has `ttlSecondsAfterFinished`, but the administrator did not permit the operator to delete jobs.",
    )
    CANCELLED = (
        "Cancelled",
        Fault.USER,
        "`spec.cancel` was set. The output with its checkpoints is kept.",
        "to train the job after all, delete it and create it again without spec.cancel",
    )
    DEADLINE_EXCEEDED = (
        "DeadlineExceeded",
        Fault.USER,
        "The job was active for longer than `activeDeadlineSeconds`.",
        "raise activeDeadlineSeconds, or train fewer steps",
    )
    PENDING_DEADLINE_EXCEEDED = (
        "PendingDeadlineExceeded",
        Fault.USER,
        "Not all nodes ran within `pendingDeadlineSeconds`; the message contains the pending reason.",
        "free capacity in the cluster, request less, or raise pendingDeadlineSeconds",
    )
    INVALID_SPEC = (
        "InvalidSpec",
        Fault.USER,
        "The spec is inconsistent, or does not fit the storage or the model.",
        "correct the field that the message names",
    )
    NAME_TAKEN = (
        "NameTaken",
        Fault.USER,
        "A Service, ConfigMap or pod of another owner has a name that the job needs; a job that ran before waits.",
        "rename the job, or delete the object if it is not needed",
    )
    DATASET_ERROR = (
        "DatasetError",
        Fault.USER,
        "Rows are missing or malformed; the message names file, line and column.",
        "correct the row, or set dataset.onBadRow: skip",
    )
    CHAT_TEMPLATE_ERROR = (
        "ChatTemplateError",
        Fault.USER,
        "The tokenizer's chat template cannot render a conversation.",
        "correct the conversation, or the tokenizer's chat template",
    )
    MODEL_NOT_FOUND = (
        "ModelNotFound",
        Fault.USER,
        "The path does not exist, or the Hub has no such model that the job may read.",
        "correct the model's path or name, or mount the volume that contains it",
    )
    MODEL_ERROR = (
        "ModelError",
        Fault.USER,
        "The model's files cannot be loaded.",
        "check that the model's files are complete and its architecture is supported",
    )
    OUTPUT_ERROR = (
        "OutputError",
        Fault.USER,
        "The output belongs to another job, is not writable, or is not shared by all nodes.",
        "choose another output.subPath, or a claim that all nodes can write",
    )
    CHECKPOINT_CORRUPT = (
        "CheckpointCorrupt",
        Fault.USER,
        "Checkpoints exist, but none is intact; nothing was deleted.",
        "restore a checkpoint from a backup, or start over in another folder",
    )
    NON_FINITE_LOSS = (
        "NonFiniteLoss",
        Fault.USER,
        "The loss became NaN or infinite; the message names the step.",
        "lower training.learningRate, or check the rows of that step",
    )
    WORLD_SIZE_MISMATCH = (
        "WorldSizeMismatch",
        Fault.USER,
        "The number of started ranks differs from the spec.",
        "start nprocPerNode ranks per node, or let the operator start them",
    )
    MIXED_HARDWARE = (
        "MixedHardware",
        Fault.USER,
        "Ranks have different GPUs, drivers or versions.",
        "select nodes of one type with podTemplate.nodeSelector, or set training.allowMixedHardware",
    )
    DEGRADED = (
        "Degraded",
        Fault.USER,
        "The job would be slower or less accurate than its hardware allows, and `training.onDegraded` is fail.",
        "remove the cause that the message names, or set training.onDegraded: warn",
    )
    USER_CODE_ERROR = (
        "UserCodeError",
        Fault.USER,
        "A rank raised an exception that would occur again after a restart.",
        "fix the program or its settings",
    )
    START_ERROR = (
        "StartError",
        Fault.USER,
        "The entrypoint of the container cannot be executed.",
        "check spec.image and its entrypoint",
    )

    DEVICE_ASSERT = (
        "DeviceAssert",
        Fault.USER,
        "An assertion failed on the GPU, usually because a token id or label is out of range.",
        "check token ids and labels; CUDA_LAUNCH_BLOCKING=1 in spec.env shows the operation",
    )
    HUB_UNAUTHORIZED = (
        "HubUnauthorized",
        Fault.USER,
        "The Hub denies access with the job's token, or without a token.",
        "request access, and set HF_TOKEN in spec.env from a Secret",
    )
    IMAGE_BROKEN = (
        "ImageBroken",
        Fault.USER,
        "Libraries in the image are incompatible with each other.",
        "rebuild spec.image with compatible libraries",
    )

    SHARED_MEMORY_EXHAUSTED = (
        "SharedMemoryExhausted",
        Fault.RESOURCE,
        "Shared memory is too small for the data loaders or NCCL.",
        "raise shmSize, or lower dataset.numWorkers",
    )
    DISK_FULL = (
        "DiskFull",
        Fault.RESOURCE,
        "A volume is full or over its quota.",
        "free space on the volume, or use a larger one",
    )
    CUDA_OUT_OF_MEMORY = (
        "CudaOutOfMemory",
        Fault.RESOURCE,
        "A GPU ran out of memory, and would run out again with the same batch.",
        "shorten the rows (dataset.maxLength), or use larger or more GPUs",
    )
    HOST_OUT_OF_MEMORY = (
        "HostOutOfMemory",
        Fault.RESOURCE,
        "The container exceeded its memory limit.",
        "raise resources.limits.memory, set restartPolicy.maxMemory to let it grow, or lower dataset.numWorkers",
    )
    EVICTED = (
        "Evicted",
        Fault.RESOURCE,
        "The pod exceeded its limit of ephemeral storage.",
        "raise ephemeral-storage in resources.limits, or write to a volume",
    )

    GPU_HARDWARE = (
        "GpuHardware",
        Fault.INFRASTRUCTURE,
        "A GPU is defective: memory errors, NVLink errors, or off the bus.",
        "have the Kubernetes node checked",
    )
    GPU_UNAVAILABLE = (
        "GpuUnavailable",
        Fault.INFRASTRUCTURE,
        "A GPU of a Kubernetes node is unusable.",
        "have the Kubernetes node checked",
    )
    DRIVER_MISMATCH = (
        "DriverMismatch",
        Fault.INFRASTRUCTURE,
        "The driver or the GPU of a Kubernetes node is incompatible with the image.",
        "update the driver, choose other GPUs with podTemplate.nodeSelector, or change spec.image",
    )
    NODE_LOST = (
        "NodeLost",
        Fault.INFRASTRUCTURE,
        "The Kubernetes node was lost.",
        "have the Kubernetes node checked if it is lost again",
    )
    NODE_REFUSED_POD = (
        "NodeRefusedPod",
        Fault.INFRASTRUCTURE,
        "The kubelet rejected the pod for lack of resources after it was scheduled.",
        "if this repeats, check what else runs on that Kubernetes node",
    )
    CONTAINER_RUNTIME_ERROR = (
        "ContainerRuntimeError",
        Fault.INFRASTRUCTURE,
        "The container runtime of a Kubernetes node could not start the container.",
        "have the Kubernetes node checked",
    )
    GANG_INCOMPLETE = (
        "GangIncomplete",
        Fault.INFRASTRUCTURE,
        "Some nodes ran while others could not for `startupDeadlineSeconds`, or a pod of a group was missing; all were"
        " deleted and are retried later.",
        "free capacity in the cluster, or use a queue with gang admission",
    )
    POD_DELETED = (
        "PodDeleted",
        Fault.INFRASTRUCTURE,
        "A pod of a running attempt was deleted, its labels were edited, or its container was restarted.",
        "if this was not intended, find out who deletes or edits pods",
    )
    CONFIG_MAP_REPLACED = (
        "ConfigMapReplaced",
        Fault.INFRASTRUCTURE,
        "The ConfigMap of the attempt was deleted and created with other content; the pod did not use it.",
        "find out who deletes and creates ConfigMaps in the namespace",
    )
    STOPPED = (
        "Stopped",
        Fault.INFRASTRUCTURE,
        "A node received a stop signal, and no other cause is known.",
        "if this repeats, find out who stops containers",
    )
    PREEMPTED = (
        "Preempted",
        Fault.PREEMPTION,
        "A pod was preempted, drained or evicted from its Kubernetes node, or stopped by Kueue.",
        "set a higher podTemplate.priorityClassName, or use nodes that are not reclaimed",
    )

    RANK_KILLED = (
        "RankKilled",
        Fault.TRANSIENT,
        "A signal that the operator did not send ended a rank.",
        "find the sender of the signal; the kernel sends it when a host runs out of memory",
    )
    CONTAINER_KILLED = (
        "ContainerKilled",
        Fault.TRANSIENT,
        "A container was killed by a process outside it.",
        "find out what killed it; the kernel does so when a host runs out of memory",
    )
    PEER_LOST = (
        "PeerLost",
        Fault.TRANSIENT,
        "Ranks lost the connection to each other, and none reported a cause.",
        "if this repeats, check the logs of the nodes and the network between them",
    )
    HANG = (
        "Hang",
        Fault.TRANSIENT,
        "Ranks sent no heartbeat for too long; the message names the rank that holds up the others.",
        "check the stack in the message; raise restartPolicy.hangTimeoutSeconds if a step can take that long",
    )
    NETWORK_FAULT = (
        "NetworkFault",
        Fault.TRANSIENT,
        "NCCL or gloo reported a failure of the network between the nodes.",
        "check network.interface, network.nccl, and the links of the nodes in the message",
    )
    STORAGE_FAULT = (
        "StorageFault",
        Fault.TRANSIENT,
        "A file system could not be read or written (input/output error, stale file handle).",
        "check the volume that the message names, and the host or server that provides it",
    )
    PORT_IN_USE = (
        "PortInUse",
        Fault.TRANSIENT,
        "Another process used the rendezvous port.",
        "choose another network.masterPort",
    )
    RENDEZVOUS_TIMEOUT = (
        "RendezvousTimeout",
        Fault.TRANSIENT,
        "The nodes did not connect to each other in time.",
        "check DNS and network policies between the pods",
    )
    HUB_UNAVAILABLE = (
        "HubUnavailable",
        Fault.TRANSIENT,
        "The Hub did not respond.",
        "wait, or read model and dataset from a volume",
    )

    CUDA_FAULT = (
        "CudaFault",
        Fault.UNKNOWN,
        "A kernel failed on a GPU; usually caused by the program, seldom by the GPU.",
        "run once with CUDA_LAUNCH_BLOCKING=1 in spec.env, which shows the failing operation",
    )
    RANK_CRASHED = (
        "RankCrashed",
        Fault.UNKNOWN,
        "A rank crashed in native code (SIGSEGV, SIGABRT ...).",
        "check the end of the rank's log",
    )
    NO_RESULT = (
        "NoResult",
        Fault.UNKNOWN,
        "The node exited with 0 but published no result.",
        "check the end of the log: the program ended by itself",
    )
    UNEXPLAINED = (
        "Unexplained",
        Fault.UNKNOWN,
        "The cause is unknown: the node left no evidence.",
        "check the end of the log",
    )
