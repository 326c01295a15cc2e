"""Tests of counting compute devices in resource limits."""

from pathlib import Path
from typing import Any

import pytest

from finetune_api.v1alpha1.devices import (
    DEVICE_KINDS,
    DeviceKind,
    Support,
    count_devices,
    find_uncountable_resource,
    list_requested_devices,
)
from finetune_api.v1alpha1.job import FineTuneJob
from testing.builders.jobs import command, spec

KNOWN = (
    *("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "amd.com/gpu", "example.com/gpu"),
    *("gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi", "huawei.com/Ascend910", "huawei.com/Ascend910B3"),
    *("aws.amazon.com/neuroncore", "cambricon.com/mlu"),
)
NO_DEVICES = (
    *("cpu", "memory", "pods", "ephemeral-storage", "hugepages-2Mi", "kubernetes.io/batch-cpu", "rdma/hca"),
    *("rdma/ib", "nvidia.com/hostdev", "nvidia.com/rdma_ib", "vpc.amazonaws.com/efa", "k8s.amazonaws.com/efa"),
    *("openshift.io/mlnxnics", "mellanox.com/mlnx_sriov_rdma", "intel.com/intel_sriov_netdevice"),
    *("networking.gke.io.networks/rdma-0", "smarter-devices/fuse", "nvidia.com/gpumem"),
    *("huawei.com/Ascend910B3-memory", "huawei.com/Ascend910B3-core"),
)
UNKNOWN = ("aws.amazon.com/neuron", "example.com/npu", "deviceclass.resource.kubernetes.io/gpu.acme")


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


def describe_rank_count(kind: DeviceKind) -> str:
    if kind.support is Support.NONE:
        return "rejected"
    return "at most one" if kind.max_ranks_reason else "one per unit"


def test_the_table_of_devices_is_documented() -> None:
    page = Path("docs/operations/devices.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `") and line.count("|") == 6]

    assert len(rows) == len(DEVICE_KINDS) > 10
    for row, kind in zip(rows, DEVICE_KINDS, strict=True):
        backend = kind.backend if " " in kind.backend else f"`{kind.backend}`"
        cells = (f"`{kind.resource}`", kind.name, describe_rank_count(kind), backend, kind.support)
        assert row == f"| {' | '.join(cells)} |"


def test_tpus_are_known_but_not_counted() -> None:
    (devices,) = list_requested_devices({"google.com/tpu": 4, "cpu": 8})

    assert (devices.count, devices.kind.support) == (4, Support.NONE)
    assert count_devices({"google.com/tpu": 4}) == 0


def parse_job(limits: dict[str, int], *, nproc_per_node: int | None = None) -> FineTuneJob:
    fields: dict[str, Any] = spec(resources={"limits": limits}, nprocPerNode=nproc_per_node)
    present = {name: value for name, value in fields.items() if value is not None}
    return FineTuneJob.parse({"metadata": {"name": "bert"}, "spec": present})


BEGUN = {"attempts": [{"attempt": 0, "state": "Running"}]}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"resources": {"limits": {"huawei.com/Ascend910": 8}}}, id="other vendor"),
        pytest.param({"resources": {"limits": {"nvidia.com/mig-1g.10gb": 4}}, "nprocPerNode": 4}, id="MIG slices"),
        pytest.param({"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}, id="one MIG slice"),
    ],
)
def test_commands_may_use_every_device_of_the_table_except_tpus(fields: dict[str, Any]) -> None:
    program = command({"script": "train.py"}, **{"nprocPerNode": None, **fields})
    body = {name: value for name, value in spec(**program).items() if value is not None}

    assert FineTuneJob.parse({"metadata": {"name": "bert"}, "spec": body}).spec.ranks_per_node >= 1


def test_commands_must_count_ranks_on_slices_themselves() -> None:
    fields = command({"script": "train.py"}, nprocPerNode=None, resources={"limits": {"nvidia.com/mig-1g.10gb": 2}})
    body = {name: value for name, value in spec(**fields).items() if value is not None}

    with pytest.raises(ValueError, match="or set nprocPerNode if your program assigns the devices to its ranks"):
        FineTuneJob.parse({"metadata": {"name": "bert"}, "spec": body})


def test_a_job_that_requests_only_gpus_is_not_changed() -> None:
    assert parse_job({"nvidia.com/gpu": 8, "cpu": 4}).spec.nproc_per_node is None


@pytest.mark.parametrize("job", [{"spec": [], "status": BEGUN}, {"spec": {"resources": 1}, "status": BEGUN}, {}])
def test_malformed_jobs_are_rejected_by_validation_only(job: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        FineTuneJob.parse(job)
