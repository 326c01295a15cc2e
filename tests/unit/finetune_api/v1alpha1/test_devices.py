"""Tests of counting compute devices in resource limits."""

from typing import Any

import pytest

from finetune_api.v1alpha1.devices import DEVICE_TABLE_VERSION, count_devices, find_uncountable_resource
from finetune_api.v1alpha1.job import FineTuneJob
from testing.builders.jobs import spec

KNOWN = (
    "nvidia.com/gpu",
    "nvidia.com/gpu.shared",
    "nvidia.com/mig-1g.10gb",
    "amd.com/gpu",
    "example.com/gpu",
    "gpu.intel.com/i915",
    "gpu.intel.com/xe",
    "habana.ai/gaudi",
    "huawei.com/Ascend910",
    "huawei.com/Ascend910B3",
    "aws.amazon.com/neuroncore",
    "cambricon.com/mlu",
)
NO_DEVICES = (
    "cpu",
    "memory",
    "pods",
    "ephemeral-storage",
    "hugepages-2Mi",
    "kubernetes.io/batch-cpu",
    "rdma/hca",
    "rdma/ib",
    "nvidia.com/hostdev",
    "nvidia.com/rdma_ib",
    "vpc.amazonaws.com/efa",
    "k8s.amazonaws.com/efa",
    "openshift.io/mlnxnics",
    "mellanox.com/mlnx_sriov_rdma",
    "intel.com/intel_sriov_netdevice",
    "networking.gke.io.networks/rdma-0",
    "smarter-devices/fuse",
    "nvidia.com/gpumem",
    "huawei.com/Ascend910B3-memory",
    "huawei.com/Ascend910B3-core",
)
UNKNOWN = ("google.com/tpu", "aws.amazon.com/neuron", "example.com/npu", "deviceclass.resource.kubernetes.io/gpu.acme")


@pytest.mark.parametrize("name", KNOWN)
def test_every_unit_of_a_known_device_is_counted(name: str) -> None:
    assert (count_devices({name: "4", "cpu": 8}), count_devices({name: 4})) == (4, 4)
    assert find_uncountable_resource({name: 4}) is None


@pytest.mark.parametrize("name", NO_DEVICES)
def test_a_resource_that_is_no_compute_device_is_neither_counted_nor_uncountable(name: str) -> None:
    assert count_devices({name: 4}) == 0
    assert find_uncountable_resource({name: 4}) is None


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_resource_of_an_unknown_kind_is_uncountable_unless_a_known_device_is_requested(name: str) -> None:
    assert find_uncountable_resource({"cpu": 1, name: 4}) == name
    assert find_uncountable_resource({name: 4, "nvidia.com/gpu": 8}) is None
    assert find_uncountable_resource({name: 4, "nvidia.com/gpu": 0}) == name
    assert find_uncountable_resource({name: 0}) is None


def parse_job(limits: dict[str, int], *, status: object = None, nproc_per_node: int | None = None) -> FineTuneJob:
    fields: dict[str, Any] = spec(resources={"limits": limits}, nprocPerNode=nproc_per_node)
    present = {name: value for name, value in fields.items() if value is not None}
    return FineTuneJob.parse({"metadata": {"name": "bert"}, "spec": present, "status": status or {}})


BEGUN = {"attempts": [{"attempt": 0, "state": "Running"}]}


@pytest.mark.parametrize(
    ("limits", "snapshot", "ranks"),
    [
        pytest.param({"google.com/tpu": 4}, {"image": "i"}, 1, id="unknown device"),
        pytest.param({"habana.ai/gaudi": 8}, {"image": "i"}, 1, id="device that is counted now"),
        pytest.param({"habana.ai/gaudi": 8}, None, 1, id="no snapshot"),
        pytest.param(
            {"nvidia.com/gpu": 2, "nvidia.com/mig-1g.10gb": 3}, {"image": "i"}, 2, id="GPUs and other devices"
        ),
        pytest.param({"nvidia.com/gpu": 2, "rdma/hca": 1}, {"image": "i"}, 2, id="GPUs and network adapters"),
        pytest.param({"habana.ai/gaudi": 8}, {"image": "i", "deviceTable": DEVICE_TABLE_VERSION}, 8, id="table"),
    ],
)
def test_a_job_that_began_before_the_table_keeps_its_number_of_ranks(
    limits: dict[str, int], snapshot: dict[str, Any] | None, ranks: int
) -> None:
    status = BEGUN if snapshot is None else {**BEGUN, "snapshot": snapshot}
    assert parse_job(limits, status=status).spec.ranks_per_node == ranks


def test_an_explicit_number_of_ranks_is_kept() -> None:
    assert parse_job({"google.com/tpu": 4}, status=BEGUN, nproc_per_node=4).spec.ranks_per_node == 4
    assert parse_job({"google.com/tpu": 4}, nproc_per_node=4).spec.ranks_per_node == 4


def test_a_job_that_requests_only_gpus_is_not_changed() -> None:
    assert parse_job({"nvidia.com/gpu": 8, "cpu": 4}, status=BEGUN).spec.nproc_per_node is None


@pytest.mark.parametrize("job", [{"spec": [], "status": BEGUN}, {"spec": {"resources": 1}, "status": BEGUN}, {}])
def test_malformed_jobs_are_rejected_by_validation_only(job: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        FineTuneJob.parse(job)
