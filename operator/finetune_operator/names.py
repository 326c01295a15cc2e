"""Names shared by the operator: labels, environment variables, paths in the pod, and names of children."""

import re

from finetune_api.v1alpha1 import scheduling
from finetune_api.v1alpha1.job import GROUP, KIND, PLURAL, VERSION
from finetune_supervisor import contract

API_VERSION = f"{GROUP}/{VERSION}"
FINETUNEJOB = (GROUP, VERSION, PLURAL)
FINETUNEJOB_KIND = KIND

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "finetune-operator"
JOB_NAME = f"{GROUP}/job-name"
JOB_UID = f"{GROUP}/job-uid"
ATTEMPT = f"{GROUP}/attempt"
NODE_RANK = f"{GROUP}/node-rank"
START_KEY = f"{GROUP}/start-key"  # annotation

KUEUE_PREFIX = scheduling.KUEUE_PREFIX
WORKLOAD_KIND = "Workload"  # what Kueue admits
POD_GROUP_KIND = "PodGroup"  # of several projects; the operator creates them
KUEUE_MANAGED = KUEUE_FINALIZER = f"{KUEUE_PREFIX}managed"  # a label, and a finalizer of the same name

CONTAINER = "trainer"
STATUS_PORT = contract.DEFAULT_STATUS_PORT
STATUS_PORT_NAME = "status"  # network policies and monitors select the port by this name
USER_ID = 1000
USER = "finetune"

CONFIG_DIR = "/etc/finetune"
CONFIG_KEY = "job.json"
DEFAULTS_KEY = contract.DEFAULTS_FILE
SUPERVISOR_KEY = "supervisor.pyz"
OUTPUT_DIR = "/output"
RUN_DIR = "/run/finetune"
SHM_DIR = "/dev/shm"  # noqa: S108  torch data loaders share tensors there
TMP_DIR = "/tmp"  # noqa: S108  an emptyDir of the pod
TERMINATION_LOG = contract.DEFAULT_TERMINATION_LOG

MAX_LABEL_VALUE = 63  # characters, by the rules of Kubernetes
_ATTEMPT_AND_RANK = re.compile(r"([0-9]{1,9})-([0-9]{1,3})")

ENV_NAMESPACE = contract.NAMESPACE
ENV_JOB = contract.JOB
ENV_JOB_UID = contract.JOB_UID
ENV_ATTEMPT = contract.ATTEMPT
ENV_WORLD_SIZE = contract.WORLD_SIZE
ENV_CONFIG = contract.CONFIG
ENV_CONFIG_MAP = contract.CONFIG_MAP
ENV_CONFIG_SHA256 = contract.CONFIG_SHA256
ENV_OUTPUT = contract.OUTPUT
ENV_CACHE_DIR = contract.CACHE_DIR
ENV_RUN_DIR = contract.RUN_DIR
ENV_TERMINATION_LOG = contract.TERMINATION_LOG
ENV_STATUS_HOST = contract.STATUS_HOST
ENV_STATUS_PORT = contract.STATUS_PORT
ENV_GRACE_SECONDS = contract.GRACE_SECONDS
ENV_HANG_SECONDS = contract.HANG_SECONDS
ENV_CPUS = contract.CPUS
ENV_GPUS = contract.GPUS
ENV_OTHER_GPUS = contract.OTHER_GPUS
ENV_HIDDEN = contract.HIDDEN_ENV

CONFIG_MAP_REPLACED = contract.CONFIG_MAP_REPLACED


def service_name(job_name: str) -> str:
    """Return the name of the headless Service, which all attempts share."""
    return job_name


def workload_name(job_name: str, job_uid: str) -> str:
    """Return the name of the pod group of a job with a queue, and of the Workload that Kueue creates for the group.

    All attempts have the same group: a new group would be queued behind the others (decisions/134).
    """
    return f"{job_name}-{job_uid[:8]}"


def config_map_name(job_name: str, job_uid: str, attempt: int) -> str:
    """Return the name of the immutable ConfigMap of one attempt.

    The name contains a prefix of the uid: a kubelet caches an immutable ConfigMap by name while a pod mounts it, and
    would mount the ConfigMap of a deleted job of the same name in new pods (decisions/118).
    """
    return f"{job_name}-{attempt}-{job_uid[:8]}"


def pod_group_name(job_name: str, job_uid: str, attempt: int) -> str:
    """Return the name of the PodGroup of one attempt, which contains the uid and the attempt for the same reasons.

    It is also the value of a label, so that it has at most 63 characters. KAI requires a name that is unique in the
    cluster.
    """
    suffix = f"-{attempt}-{job_uid[:8]}"
    return f"{job_name[: MAX_LABEL_VALUE - len(suffix)]}{suffix}"


def pod_name(job_name: str, attempt: int, node_rank: int) -> str:
    """Return the name and hostname of a pod.

    The name contains the attempt, because names of earlier attempts remain in DNS caches and on lost Kubernetes nodes.
    """
    return f"{job_name}-{attempt}-{node_rank}"


def parse_pod_name(name: str, job_name: str) -> tuple[int, int] | None:
    """Parse attempt and node rank from a pod name, which is immutable, unlike labels; None for a foreign name."""
    prefix = f"{job_name}-"
    match = _ATTEMPT_AND_RANK.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return (int(match[1]), int(match[2])) if match else None
