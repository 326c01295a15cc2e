"""Every reason that a condition, attempt or event may give: whose fault it tells of, what follows, and what to do."""

from enum import StrEnum
from typing import Self

from finetune_api.v1alpha1.status import Fault


class FailureAction(StrEnum):
    """What follows from a failure, as long as the restart budget lasts."""

    RESTART = "Restart"
    REPAIR = "Repair"  # and restart
    FAIL = "Fail"


class Reason(StrEnum):
    """A stable CamelCase word. Those of failures carry the fault, by which restart budgets are kept, and advice."""

    fault: Fault | None
    meaning: str
    advice: str  # what a person can do, fit for the end of a message

    def __new__(cls, word: str, fault: Fault | None = None, meaning: str = "", advice: str = "") -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.fault = fault
        member.meaning = meaning
        member.advice = advice
        return member

    @property
    def action(self) -> FailureAction:
        """What the operator does about such a failure."""
        if self in (Reason.CUDA_OUT_OF_MEMORY, Reason.HOST_OUT_OF_MEMORY, Reason.SHARED_MEMORY_EXHAUSTED):
            return FailureAction.REPAIR
        return FailureAction.FAIL if self.fault in (Fault.USER, Fault.RESOURCE) else FailureAction.RESTART

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
    CREATE_CONTAINER_ERROR = (
        "CreateContainerError",
        None,
        "A kubelet cannot make a container and tries again; after three minutes the attempt ends and is judged.",
    )
    CREATE_REFUSED = "CreateRefused", None, "Quota, policy or a dead webhook refuses an object; tried again."
    PREDECESSOR_TERMINATING = (
        "PredecessorTerminating",
        None,
        "Objects of a deleted job of the same name are still there; waited for until they are gone.",
    )
    VOLUMES_NOT_READY = (
        "VolumesNotReady",
        None,
        "A pod has a machine, but a volume or its network is missing (a claim, a Secret, a driver); waited for.",
    )
    CONTAINER_CREATING = (
        "ContainerCreating",
        None,
        "A pod's container has been made for a minute: its image is being pulled.",
    )
    IMAGE_PULL_FAILED = (
        "ImagePullFailed",
        Fault.USER,
        "The image could not be had for ten minutes, or its name is invalid; a registry in trouble is waited out.",
        "correct spec.image or spec.imagePullSecrets",
    )

    DEADLINE_EXCEEDED = (
        "DeadlineExceeded",
        Fault.USER,
        "The job was active for longer than `activeDeadlineSeconds`.",
        "raise activeDeadlineSeconds in time, or ask for fewer steps",
    )
    PENDING_DEADLINE_EXCEEDED = (
        "PendingDeadlineExceeded",
        Fault.USER,
        "The nodes did not all run within `pendingDeadlineSeconds`; the message says what they waited for.",
        "make room in the cluster, ask for less, or raise pendingDeadlineSeconds",
    )
    INVALID_SPEC = (
        "InvalidSpec",
        Fault.USER,
        "The spec contradicts itself, the cluster's storage or the model.",
        "correct what the message names",
    )
    NAME_TAKEN = (
        "NameTaken",
        Fault.USER,
        "A Service, ConfigMap or pod of the job's names belongs to somebody else; a job that ran before waits.",
        "rename the job, or remove the object if nobody needs it",
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
        "No such path, or no such model on the Hub that this job may read.",
        "correct the model's path or name, or mount the volume that holds it",
    )
    MODEL_ERROR = (
        "ModelError",
        Fault.USER,
        "The model's files cannot be loaded.",
        "check that the model's files are whole and of a supported architecture",
    )
    OUTPUT_ERROR = (
        "OutputError",
        Fault.USER,
        "The output belongs to another job, cannot be written, or is not shared.",
        "choose another output.subPath, or a claim that all nodes can write",
    )
    CHECKPOINT_CORRUPT = (
        "CheckpointCorrupt",
        Fault.USER,
        "There are checkpoints, but none of them is whole.",
        "remove that file, or begin anew",
    )
    NON_FINITE_LOSS = (
        "NonFiniteLoss",
        Fault.USER,
        "The loss became NaN or infinite; the message names the step.",
        "lower training.learningRate, or look at the rows of that step",
    )
    WORLD_SIZE_MISMATCH = (
        "WorldSizeMismatch",
        Fault.USER,
        "Another number of ranks was started than was promised.",
        "start as many ranks as nprocPerNode says, or leave that to the operator",
    )
    MIXED_HARDWARE = (
        "MixedHardware",
        Fault.USER,
        "Ranks have different GPUs, drivers or versions.",
        "choose nodes of one kind by podTemplate.nodeSelector, or set training.allowMixedHardware",
    )
    USER_CODE_ERROR = (
        "UserCodeError",
        Fault.USER,
        "A rank raised an exception that a restart would raise again.",
        "only the program or its settings can be mended",
    )
    START_ERROR = (
        "StartError",
        Fault.USER,
        "The container's entrypoint cannot be run.",
        "check spec.image and its entrypoint",
    )

    DEVICE_ASSERT = (
        "DeviceAssert",
        Fault.USER,
        "An assertion failed on the GPU, mostly a token id or label that is out of range.",
        "check token ids and labels; CUDA_LAUNCH_BLOCKING=1 in spec.env tells where",
    )
    HUB_UNAUTHORIZED = (
        "HubUnauthorized",
        Fault.USER,
        "The Hub lets this job's token, or the lack of one, not read it.",
        "ask for access, and give HF_TOKEN in spec.env from a Secret",
    )
    IMAGE_BROKEN = (
        "ImageBroken",
        Fault.USER,
        "Libraries of the image do not fit together.",
        "rebuild spec.image with libraries that fit together",
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
        "A volume is full or its quota is spent.",
        "make room on the volume or take a larger one",
    )
    CUDA_OUT_OF_MEMORY = (
        "CudaOutOfMemory",
        Fault.RESOURCE,
        "A GPU ran out of memory; the same batch would again.",
        "shorten the rows (dataset.maxLength), or use larger or more GPUs",
    )
    HOST_OUT_OF_MEMORY = (
        "HostOutOfMemory",
        Fault.RESOURCE,
        "The container passed its memory limit.",
        "raise resources.limits.memory, let it grow by restartPolicy.maxMemory, or lower dataset.numWorkers",
    )
    EVICTED = (
        "Evicted",
        Fault.RESOURCE,
        "The pod passed its own limits of ephemeral storage.",
        "raise ephemeral-storage in resources.limits, or write to a volume",
    )

    GPU_HARDWARE = (
        "GpuHardware",
        Fault.INFRASTRUCTURE,
        "A GPU is broken: memory errors, NVLink, or fallen off the bus.",
        "have the machine checked",
    )
    GPU_UNAVAILABLE = (
        "GpuUnavailable",
        Fault.INFRASTRUCTURE,
        "A Kubernetes node's GPU cannot be used.",
        "have the machine checked",
    )
    DRIVER_MISMATCH = (
        "DriverMismatch",
        Fault.INFRASTRUCTURE,
        "A Kubernetes node's driver does not fit the image or GPU.",
        "the machine's driver, or spec.image, must be another",
    )
    NODE_LOST = (
        "NodeLost",
        Fault.INFRASTRUCTURE,
        "The Kubernetes node went away.",
        "have the machine checked if it goes away again",
    )
    NODE_REFUSED_POD = (
        "NodeRefusedPod",
        Fault.INFRASTRUCTURE,
        "The kubelet had no room for the pod after all.",
        "look at what else runs on that machine, if it repeats",
    )
    CONTAINER_RUNTIME_ERROR = (
        "ContainerRuntimeError",
        Fault.INFRASTRUCTURE,
        "The container runtime of a Kubernetes node could not start the container.",
        "have the machine checked",
    )
    GANG_INCOMPLETE = (
        "GangIncomplete",
        Fault.INFRASTRUCTURE,
        "Some nodes ran while others could not for `startupDeadlineSeconds`; all were released, to be tried again.",
        "make room in the cluster, or queue jobs so that they are admitted whole",
    )
    POD_DELETED = (
        "PodDeleted",
        Fault.INFRASTRUCTURE,
        "Somebody deleted a pod while the attempt was to go on, edited its labels, or had its container restarted.",
        "find out who deletes or edits pods, if it was nobody you know",
    )
    STOPPED = (
        "Stopped",
        Fault.INFRASTRUCTURE,
        "A node was asked to stop, and nothing else explains the end.",
        "find out who stops containers, if it repeats",
    )
    PREEMPTED = (
        "Preempted",
        Fault.PREEMPTION,
        "A pod was preempted, drained or evicted from its Kubernetes node.",
        "raise podTemplate.priorityClassName, or use machines that are not taken back",
    )

    RANK_KILLED = (
        "RankKilled",
        Fault.TRANSIENT,
        "A rank was ended by a signal that nobody here sent.",
        "find out who sent the signal; the kernel does where a machine runs out of memory",
    )
    CONTAINER_KILLED = (
        "ContainerKilled",
        Fault.TRANSIENT,
        "A whole container was killed from outside.",
        "find out who killed it; the kernel does where a machine runs out of memory",
    )
    PEER_LOST = (
        "PeerLost",
        Fault.TRANSIENT,
        "Ranks lost the connection to each other, and none says why.",
        "look at the logs of the nodes and at the network between them, if it repeats",
    )
    HANG = (
        "Hang",
        Fault.TRANSIENT,
        "Ranks gave no sign of life for too long; the message names the one that stands out.",
        "look at the stack in the message; raise restartPolicy.hangTimeoutSeconds if a step may really take so long",
    )
    NETWORK_FAULT = (
        "NetworkFault",
        Fault.TRANSIENT,
        "The network between the nodes failed, by the words of NCCL or gloo.",
        "check network.interface, network.nccl, and the links of the machines that are named",
    )
    STORAGE_FAULT = (
        "StorageFault",
        Fault.TRANSIENT,
        "A file system could not be read or written (input/output error, stale file handle).",
        "look at the volume that the message names, and at the machine or server that it is on",
    )
    PORT_IN_USE = (
        "PortInUse",
        Fault.TRANSIENT,
        "The rendezvous port was taken by another process.",
        "choose another network.masterPort",
    )
    RENDEZVOUS_TIMEOUT = (
        "RendezvousTimeout",
        Fault.TRANSIENT,
        "The nodes did not find each other in time.",
        "check DNS and network policies between the pods",
    )
    HUB_UNAVAILABLE = (
        "HubUnavailable",
        Fault.TRANSIENT,
        "The Hub did not answer.",
        "wait, or read model and rows from a volume",
    )

    CUDA_FAULT = (
        "CudaFault",
        Fault.UNKNOWN,
        "A kernel failed on a GPU; mostly the program's fault, seldom the GPU's.",
        "run once with CUDA_LAUNCH_BLOCKING=1 in spec.env, which tells the operation",
    )
    RANK_CRASHED = (
        "RankCrashed",
        Fault.UNKNOWN,
        "A rank crashed in native code (SIGSEGV, SIGABRT ...).",
        "look at the end of the rank's log; native libraries say little more",
    )
    NO_RESULT = (
        "NoResult",
        Fault.UNKNOWN,
        "The node ended with exit 0 but left no result.",
        "look at the end of the log: the program ended by itself",
    )
    UNEXPLAINED = (
        "Unexplained",
        Fault.UNKNOWN,
        "Nothing the node left behind says why it ended.",
        "look at the end of the log",
    )
