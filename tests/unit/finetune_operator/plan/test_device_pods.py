"""Tests of the pod and the summary for each kind of device."""

from typing import Any

import pytest

from finetune_operator.plan.device_summary import describe_devices
from testing.builders.golden import NVIDIA_GPUS, assert_golden
from testing.builders.jobs import command
from testing.builders.manifests import build_first_pod_manifest, build_run_plan

GPUS_CLAIM = {"name": "gpus", "resourceClaimTemplateName": "four-gpus"}
CHANNEL_CLAIM = {"name": "channel", "resourceClaimTemplateName": "bert-channel"}


def request(resource: str, count: int, **fields: Any) -> dict[str, Any]:
    return {"nprocPerNode": None, "resources": {"limits": {resource: count}}, **fields}


def run_own_program(image: str, **fields: Any) -> dict[str, Any]:
    return command({"script": "train.py"}, **{**fields, "image": image})


CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "nvidia-gpu": (
        NVIDIA_GPUS,
        8,
        "8 x nvidia.com/gpu per node (NVIDIA GPU), 1 rank each; backend nccl",
    ),
    "nvidia-mig": (
        request("nvidia.com/mig-1g.10gb", 1),
        1,
        "1 x nvidia.com/mig-1g.10gb per node (MIG slice of an NVIDIA GPU), 1 rank each; backend nccl",
    ),
    "nvidia-time-sliced": (
        request("nvidia.com/gpu.shared", 1),
        1,
        "1 x nvidia.com/gpu.shared per node (time slice of an NVIDIA GPU), 1 rank each; backend nccl",
    ),
    "amd-gpu": (
        request("amd.com/gpu", 8, image="registry.example/trainer-rocm:1"),
        8,
        "8 x amd.com/gpu per node (AMD GPU), 1 rank each; backend nccl",
    ),
    "gaudi": (
        run_own_program("registry.example/gaudi:1", **request("habana.ai/gaudi", 8)),
        8,
        "8 x habana.ai/gaudi per node (Intel Gaudi), 1 rank each; backend hccl if the command uses torch",
    ),
    "ascend": (
        run_own_program("registry.example/ascend:1", **request("huawei.com/Ascend910", 8)),
        8,
        "8 x huawei.com/Ascend910 per node (Huawei Ascend NPU), 1 rank each; backend hccl if the command uses torch",
    ),
    "resource-claim": (
        {
            "nprocPerNode": 4,
            "resources": {"claims": [{"name": "gpus"}]},
            "podTemplate": {"resourceClaims": [GPUS_CLAIM]},
        },
        4,
        "claims gpus per node, ranks per node: 4; backend that of torch for the devices",
    ),
    "compute-domain": (
        {
            "nprocPerNode": None,
            "resources": {"limits": {"nvidia.com/gpu": 4}, "claims": [{"name": "channel"}]},
            "podTemplate": {"resourceClaims": [CHANNEL_CLAIM]},
        },
        4,
        "4 x nvidia.com/gpu per node (NVIDIA GPU) and claims channel per node, 1 rank each; backend nccl",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_pod_equals_the_golden_file(case: str) -> None:
    fields, _, _ = CASES[case]

    base = None if fields == NVIDIA_GPUS else "pods/nvidia-gpu"
    assert_golden(f"pods/{case}", [build_first_pod_manifest(**fields)], base=base)


@pytest.mark.parametrize("case", CASES)
def test_ranks_and_backend_of_a_device(case: str) -> None:
    fields, ranks, summary = CASES[case]
    run = build_run_plan(**fields)

    assert (run.nproc_per_node, describe_devices(run.spec)) == (ranks, summary)


@pytest.mark.parametrize(
    ("fields", "summary"),
    [
        pytest.param({}, "CPUs, ranks per node: 2; backend gloo", id="CPUs"),
        pytest.param(
            request("nvidia.com/gpu", 8, nprocPerNode=4),
            "8 x nvidia.com/gpu per node (NVIDIA GPU), ranks per node: 4; backend nccl",
            id="fewer ranks than GPUs",
        ),
        pytest.param(
            request("example.com/npu", 8, nprocPerNode=4),
            "example.com/npu (not in the table of devices), ranks per node: 4; backend that of torch for the devices",
            id="unknown device",
        ),
    ],
)
def test_summary_of_other_jobs(fields: dict[str, Any], summary: str) -> None:
    assert describe_devices(build_run_plan(**fields).spec) == summary
