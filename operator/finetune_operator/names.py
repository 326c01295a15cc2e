"""Labels, annotations, environment names, paths and names of children; nothing else spells them."""

import re

from finetune_api.v1alpha1.job import GROUP, KIND, PLURAL, VERSION

API_VERSION = f"{GROUP}/{VERSION}"
FINETUNEJOB = (GROUP, VERSION, PLURAL)
FINETUNEJOB_KIND = KIND

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "finetune-operator"
JOB_NAME = f"{GROUP}/job-name"
JOB_UID = f"{GROUP}/job-uid"
ATTEMPT = f"{GROUP}/attempt"
NODE_RANK = f"{GROUP}/node-rank"

CONTAINER = "trainer"
STATUS_PORT = 8080
USER_ID = 1000
USER = "finetune"

CONFIG_DIR = "/etc/finetune"
CONFIG_KEY = "job.json"
SUPERVISOR_KEY = "supervisor.pyz"
OUTPUT_DIR = "/output"
RUN_DIR = "/run/finetune"
SHM_DIR = "/dev/shm"  # noqa: S108  the place where torch's loaders share tensors
TMP_DIR = "/tmp"  # noqa: S108  an emptyDir of the pod's own
TERMINATION_LOG = "/dev/termination-log"

_PLACE = re.compile(r"([0-9]{1,9})-([0-9]{1,3})")

ENV_NAMESPACE = "FINETUNE_NAMESPACE"
ENV_JOB = "FINETUNE_JOB"
ENV_JOB_UID = "FINETUNE_JOB_UID"
ENV_ATTEMPT = "FINETUNE_ATTEMPT"
ENV_WORLD_SIZE = "FINETUNE_WORLD_SIZE"
ENV_CONFIG = "FINETUNE_CONFIG"
ENV_OUTPUT = "FINETUNE_OUTPUT"
ENV_CACHE_DIR = "FINETUNE_CACHE_DIR"
ENV_RUN_DIR = "FINETUNE_RUN_DIR"
ENV_TERMINATION_LOG = "FINETUNE_TERMINATION_LOG"
ENV_STATUS_PORT = "FINETUNE_STATUS_PORT"
ENV_GRACE_SECONDS = "FINETUNE_GRACE_SECONDS"
ENV_HANG_SECONDS = "FINETUNE_HANG_SECONDS"
ENV_HIDDEN = "FINETUNE_HIDDEN_ENV"


def service_name(job_name: str) -> str:
    """The headless Service, made once for all attempts."""
    return job_name


def config_map_name(job_name: str, attempt: int) -> str:
    """The immutable ConfigMap of one attempt."""
    return f"{job_name}-{attempt}"


def pod_name(job_name: str, attempt: int, node_rank: int) -> str:
    """Pod and hostname; the attempt is in it because DNS caches and lost nodes keep old names alive."""
    return f"{job_name}-{attempt}-{node_rank}"


def parse_pod_name(name: str, job_name: str) -> tuple[int, int] | None:
    """Attempt and node rank of a job's pod, which unlike its labels nobody can edit; None if it is not made by us."""
    found = _PLACE.fullmatch(name.removeprefix(f"{job_name}-"))
    return (int(found[1]), int(found[2])) if found else None
