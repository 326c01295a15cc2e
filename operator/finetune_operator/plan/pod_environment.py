"""Builds the environment variables of the trainer container."""

import math

from finetune_api.v1alpha1.devices import Support, list_requested_devices
from finetune_api.v1alpha1.quantity import parse_quantity
from finetune_operator import names
from finetune_operator.plan.object_metadata import Manifest
from finetune_operator.plan.run_plan import NodePlan, RunPlan

_NVIDIA_GPU = "nvidia.com/gpu"
NODE_RANK_VARIABLES = frozenset({"NODE_RANK", "PET_NODE_RANK"})  # the only ones that differ between nodes
TORCHRUN_MARGIN_SECONDS = 10  # torchrun has to stop its ranks before the kubelet sends SIGKILL


def build_env_list(run_plan: RunPlan, node: NodePlan) -> list[Manifest]:
    """Return the variables of the operator, followed by those of the user, which override all unreserved variables."""
    operator_variables = [{"name": name, "value": value} for name, value in build_environment(run_plan, node).items()]
    user_variables = [variable.model_dump(by_alias=True, exclude_none=True) for variable in run_plan.spec.env]
    overridden_names = {variable["name"] for variable in user_variables}
    return [variable for variable in operator_variables if variable["name"] not in overridden_names] + user_variables


def build_environment(run_plan: RunPlan, node: NodePlan) -> dict[str, str]:
    """Return the variables of launcher, trainer and NCCL, but not RANK, which scripts use to detect torchrun."""
    torchrun = {
        "NNODES": str(len(run_plan.nodes)),
        "NODE_RANK": str(node.node_rank),
        "NPROC_PER_NODE": str(run_plan.nproc_per_node),
        "MASTER_ADDR": run_plan.master_addr,
        "MASTER_PORT": str(run_plan.spec.network.master_port),
    }
    grace_seconds = run_plan.spec.termination_grace_period_seconds
    return {
        **torchrun,
        **{f"PET_{name}": value for name, value in torchrun.items()},
        "OMP_NUM_THREADS": str(compute_threads_per_rank(_read_cpus(run_plan), ranks=run_plan.nproc_per_node)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_seconds - TORCHRUN_MARGIN_SECONDS),
        "HOME": names.TMP_DIR,
        "USER": names.USER,  # torch calls getuser() for its cache paths, which fails for a uid without a passwd entry
        "PYTHONUNBUFFERED": "1",
        **_build_output_environment(run_plan),
        names.ENV_NAMESPACE: run_plan.namespace,
        names.ENV_JOB: run_plan.job_name,
        names.ENV_JOB_UID: run_plan.job_uid,
        names.ENV_ATTEMPT: str(run_plan.attempt),
        names.ENV_WORLD_SIZE: str(run_plan.world_size),
        names.ENV_CONFIG: f"{names.CONFIG_DIR}/{names.CONFIG_KEY}",
        names.ENV_CONFIG_MAP: run_plan.config_map_name,
        names.ENV_CONFIG_SHA256: ",".join(f"{name}={digest}" for name, digest in run_plan.config_digests.items()),
        names.ENV_RUN_DIR: names.RUN_DIR,
        names.ENV_TERMINATION_LOG: names.TERMINATION_LOG,
        names.ENV_STATUS_PORT: str(run_plan.spec.status_port),
        names.ENV_GRACE_SECONDS: str(grace_seconds),
        names.ENV_HANG_SECONDS: str(run_plan.spec.hang_seconds),
        **_build_device_environment(run_plan),
        **_build_network_environment(run_plan),
        **_build_secret_environment(run_plan),
    }


# Jobs of one claim share downloads, but not HF_HOME, which also contains the login token and the code of models.
SHARED_HUB_CACHES = {
    "HF_HUB_CACHE": f"{names.OUTPUT_DIR}/cache/huggingface/hub",
    "HF_XET_CACHE": f"{names.OUTPUT_DIR}/cache/huggingface/xet",
    "HF_DATASETS_CACHE": f"{names.OUTPUT_DIR}/cache/huggingface/datasets",
}


def _build_output_environment(run_plan: RunPlan) -> dict[str, str]:
    """Return the variables for the result and download paths; without spec.output, downloads are stored in $HOME."""
    if run_plan.spec.output is None:
        return {}
    sets_hf_home = any(variable.name == "HF_HOME" for variable in run_plan.spec.env)
    return {
        **({} if sets_hf_home else SHARED_HUB_CACHES),
        names.ENV_CACHE_DIR: f"{names.OUTPUT_DIR}/cache",
        names.ENV_OUTPUT: f"{names.OUTPUT_DIR}/{run_plan.output_folder}",
    }


def _build_secret_environment(run_plan: RunPlan) -> dict[str, str]:
    """Return the variable that names all variables from Secrets, so that the supervisor redacts their values."""
    secret_names = [variable.name for variable in run_plan.spec.env if "secretKeyRef" in (variable.value_from or {})]
    return {names.ENV_HIDDEN: ",".join(secret_names)} if secret_names else {}


def _build_network_environment(run_plan: RunPlan) -> dict[str, str]:
    network = run_plan.spec.network
    settings = network.nccl.model_dump(exclude_none=True)
    variables = {f"NCCL_{name.upper()}": str(int(v) if isinstance(v, bool) else v) for name, v in settings.items()}
    if network.interface:
        variables |= {"GLOO_SOCKET_IFNAME": network.interface, "NCCL_SOCKET_IFNAME": network.interface}
    return variables


def _build_device_environment(run_plan: RunPlan) -> dict[str, str]:
    """Return the CPUs and GPUs of the container, which the trainer compares with those that it finds."""
    devices = list_requested_devices(run_plan.spec.resources.limits)
    others = [each.resource for each in devices if each.kind.support is Support.TRAINER_IMAGE]
    cpus, gpus = _read_cpus(run_plan), run_plan.spec.resources.limits.get(_NVIDIA_GPU)
    return {
        **({names.ENV_CPUS: f"{cpus:g}"} if cpus is not None else {}),
        **({names.ENV_GPUS: str(int(parse_quantity(gpus)))} if gpus is not None and parse_quantity(gpus) else {}),
        **({names.ENV_OTHER_GPUS: others[0]} if others else {}),
    }


def _read_cpus(run_plan: RunPlan) -> float | None:
    """Return the CPU limit of the container, otherwise its request, otherwise None."""
    resources = run_plan.spec.resources
    cpus = resources.limits.get("cpu", resources.requests.get("cpu"))
    return None if cpus is None else parse_quantity(cpus)


def compute_threads_per_rank(cpus: float | None, *, ranks: int) -> int:
    """Return the CPUs divided by the ranks of the node, at least 1; 1 if the CPUs are unknown, as in torchrun."""
    return max(1, math.floor(cpus / ranks)) if cpus is not None else 1
