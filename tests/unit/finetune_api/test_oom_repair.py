"""Tests of repairs after out-of-memory failures, and of the order in which they are applied."""

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from finetune_api.batch import Batch, resolve_batch
from finetune_api.oom_repair import (
    MemoryShortage,
    apply_repair,
    build_memory_advice,
    explain_unsupported_repair,
    find_next_repair,
)
from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.repair import Repair
from testing.builders.jobs import command, job
from testing.builders.jobs import spec as build_spec


def build_single_rank_spec(**fields: Any) -> FineTuneJobSpec:
    """Return a spec with one rank per node."""
    return FineTuneJobSpec.model_validate(build_spec(**{"nprocPerNode": 1, **fields}))


def resolve_spec_batch(job_spec: FineTuneJobSpec) -> Batch:
    training = job_spec.training
    return resolve_batch(
        micro_batch_size=training.per_device_train_batch_size,
        accumulation_steps=training.gradient_accumulation_steps,
        effective_batch=training.global_batch_size,
        world_size=job_spec.world_size,
    )


def build_shortage(
    job_spec: FineTuneJobSpec,
    repair: Repair | None = None,
    *,
    reason: Reason = Reason.CUDA_OUT_OF_MEMORY,
    **fields: Any,
) -> MemoryShortage:
    batch = fields.pop("batch") if "batch" in fields else resolve_spec_batch(apply_repair(job_spec, repair))
    return MemoryShortage(reason, job_spec, repair, batch, **fields)


def list_repair_descriptions(job_spec: FineTuneJobSpec, **fields: Any) -> list[str]:
    """Return the descriptions of all repairs in the order in which they are applied."""
    repair: Repair | None = None
    changes = []
    while step := find_next_repair(build_shortage(job_spec, repair, **fields)):
        repair, change = step
        changes.append(change)
    return changes


def test_repairs_of_full_fine_tuning_are_ordered_by_cost() -> None:
    job_spec = build_single_rank_spec(
        lora=None, numNodes=2, training={"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 3}
    )

    assert list_repair_descriptions(job_spec) == [
        "perDeviceTrainBatchSize 4 -> 2, gradientAccumulationSteps 3 -> 6 (effective batch stays 24)",
        "perDeviceTrainBatchSize 2 -> 1, gradientAccumulationSteps 6 -> 12 (effective batch stays 24)",
        "gradientCheckpointing: true",
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "deepspeed preset none -> zero1",
        "deepspeed preset zero1 -> zero2",
        "deepspeed preset zero2 -> zero3",
        "deepspeed preset zero3 -> zero3_offload",
    ]


@pytest.mark.parametrize(
    ("fields", "presets"),
    [
        pytest.param({"lora": {}, "numNodes": 2}, ["none -> zero3", "zero3 -> zero3_offload"], id="lora"),
        pytest.param({"lora": {}, "numNodes": 1}, [], id="single rank"),
        pytest.param({"lora": {"quantization": "nf4"}, "numNodes": 2}, [], id="4-bit weights"),
        pytest.param({"lora": {}, "numNodes": 2, "training": {"probe": True}}, [], id="probe"),
        pytest.param({"numNodes": 2, "training": {"optim": "adamw_8bit"}}, [], id="moments in 8 bits"),
        pytest.param({"numNodes": 2, "fsdp": {}}, [], id="fsdp"),
        pytest.param(
            {"numNodes": 2, "deepspeed": {"config": {"zero_optimization": {"stage": 1}}}},
            [],
            id="deepspeed config",
        ),
        pytest.param(
            {"lora": None, "numNodes": 2, "deepspeed": {"preset": "zero2_offload"}},
            ["zero2_offload -> zero3", "zero3 -> zero3_offload"],
            id="spec with a preset",
        ),
    ],
)
def test_repairs_use_all_sharding_presets_that_the_spec_allows(fields: dict[str, Any], presets: list[str]) -> None:
    training = {"gradientCheckpointing": True, **fields.get("training", {})}
    env = [{"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "max_split_size_mb:128"}]

    changes = list_repair_descriptions(build_single_rank_spec(**{**fields, "training": training, "env": env}))

    assert changes == [f"deepspeed preset {step}" for step in presets]


def test_command_has_no_gpu_memory_repair() -> None:
    assert list_repair_descriptions(job(**command({"script": "a.py"})).spec, batch=None) == []


def test_spec_without_a_repair_is_unchanged() -> None:
    job_spec = build_single_rank_spec()

    assert apply_repair(job_spec, None) is job_spec


@given(
    micro_batch_size=st.integers(1, 200),
    accumulation_steps=st.none() | st.integers(1, 50),
    nodes=st.integers(1, 8),
    has_global_batch=st.booleans(),
    has_lora=st.booleans(),
)
def test_repairs_keep_the_effective_batch_until_none_is_left(
    micro_batch_size: int, accumulation_steps: int | None, nodes: int, has_global_batch: bool, has_lora: bool
) -> None:
    training: dict[str, Any] = {"perDeviceTrainBatchSize": micro_batch_size}
    if accumulation_steps is not None:
        training["gradientAccumulationSteps"] = accumulation_steps
    if has_global_batch:
        training["globalBatchSize"] = micro_batch_size * (accumulation_steps or 1) * nodes
    job_spec = build_single_rank_spec(numNodes=nodes, lora={} if has_lora else None, training=training)
    effective_batch = resolve_spec_batch(job_spec).effective
    repair: Repair | None = None

    for _ in range(20):
        step = find_next_repair(build_shortage(job_spec, repair))
        if step is None:
            break
        assert step[0] != repair
        repair = step[0]
        repaired = apply_repair(job_spec, repair)
        assert resolve_spec_batch(repaired).effective == effective_batch
        FineTuneJobSpec.model_validate_json(repaired.model_dump_json(by_alias=True, exclude_unset=True))
    else:
        pytest.fail("more than twenty repairs")
    assert resolve_spec_batch(apply_repair(job_spec, repair)).micro_batch_size == 1


def test_repair_replaces_auto_batch_size_with_a_smaller_micro_batch() -> None:
    job_spec = build_single_rank_spec(numNodes=2, training={"globalBatchSize": 24, "perDeviceTrainBatchSize": "auto"})

    repair, change = find_next_repair(build_shortage(job_spec, batch=Batch(6, 2, 2))) or (None, "")

    assert change == "perDeviceTrainBatchSize 6 -> 3, gradientAccumulationSteps 2 -> 4 (effective batch stays 24)"
    assert resolve_spec_batch(apply_repair(job_spec, repair)) == Batch(3, 4, 2)
    assert not apply_repair(job_spec, repair).training.has_auto_batch_size


def test_repair_recomputes_all_layers_before_it_shards() -> None:
    training = {"gradientCheckpointing": True, "gradientCheckpointingInterval": 3, "perDeviceTrainBatchSize": 1}
    job_spec = build_single_rank_spec(numNodes=2, training=training)

    repair, change = find_next_repair(build_shortage(job_spec, batch=Batch(1, 1, 2))) or (None, "")

    assert change == "gradientCheckpointingInterval 3 -> 1"
    assert apply_repair(job_spec, repair).training.recomputation_interval == 1


def test_repair_keeps_auto_batch_size_if_the_micro_batch_is_one() -> None:
    job_spec = build_single_rank_spec(numNodes=2, training={"globalBatchSize": 24, "perDeviceTrainBatchSize": "auto"})

    repair, change = find_next_repair(build_shortage(job_spec, batch=Batch(1, 12, 2))) or (None, "")

    assert change == "gradientCheckpointing: true"
    assert apply_repair(job_spec, repair).training.has_auto_batch_size


HOST = Reason.HOST_OUT_OF_MEMORY
SHM = Reason.SHARED_MEMORY_EXHAUSTED


def build_spec_with_memory_limit(memory_limit: str = "16Gi", **fields: Any) -> FineTuneJobSpec:
    return build_single_rank_spec(**{"resources": {"limits": {"memory": memory_limit}}, **fields})


def test_memory_limit_is_doubled_before_loader_processes_are_reduced() -> None:
    job_spec = build_spec_with_memory_limit(restartPolicy={"maxMemory": "50Gi"})

    assert list_repair_descriptions(job_spec, reason=HOST) == [
        "resources.limits.memory 16Gi -> 32Gi",
        "resources.limits.memory 32Gi -> 50Gi",
        "dataset.numWorkers default -> 1",
        "dataset.numWorkers 1 -> 0",
    ]


@pytest.mark.parametrize(
    ("job_spec", "fields"),
    [
        pytest.param(build_spec_with_memory_limit(), {}, id="no maxMemory"),
        pytest.param(build_spec_with_memory_limit(restartPolicy={"maxMemory": "16Gi"}), {}, id="maxMemory reached"),
        pytest.param(
            build_spec_with_memory_limit(restartPolicy={"maxMemory": "32Gi"}),
            {"runs_in_container": False},
            id="no container",
        ),
        pytest.param(build_single_rank_spec(), {}, id="no limit"),
    ],
)
def test_loader_processes_are_reduced_if_the_limit_cannot_be_raised(
    job_spec: FineTuneJobSpec, fields: dict[str, Any]
) -> None:
    assert list_repair_descriptions(job_spec, reason=HOST, **fields)[0] == "dataset.numWorkers default -> 1"


def test_memory_request_equal_to_the_limit_is_raised_with_it() -> None:
    equal_request, lower_request = (
        {"limits": {"memory": "2Gi"}, "requests": {"memory": request}} for request in ("2Gi", "1Gi")
    )
    repair = Repair(memory="4Gi")

    for resources, request in ((equal_request, "4Gi"), (lower_request, "1Gi")):
        repaired = apply_repair(build_single_rank_spec(resources=resources), repair).resources
        assert (repaired.limits["memory"], repaired.requests["memory"]) == ("4Gi", request)


@pytest.mark.parametrize(
    ("job_spec", "first_repair"),
    [
        pytest.param(build_single_rank_spec(shmSize="2Gi"), "shmSize 2Gi -> 4Gi", id="no memory limit"),
        pytest.param(build_spec_with_memory_limit("3Gi"), "shmSize 1536Mi -> 3Gi", id="half of the limit by default"),
        pytest.param(build_spec_with_memory_limit(shmSize="12Gi"), "shmSize 12Gi -> 16Gi", id="bounded by the limit"),
    ],
)
def test_shared_memory_is_doubled_once_before_loader_processes_are_reduced(
    job_spec: FineTuneJobSpec, first_repair: str
) -> None:
    assert list_repair_descriptions(job_spec, reason=SHM) == [
        first_repair,
        "dataset.numWorkers default -> 1",
        "dataset.numWorkers 1 -> 0",
    ]


def test_shared_memory_without_a_size_is_not_doubled() -> None:
    assert list_repair_descriptions(build_single_rank_spec(), reason=SHM) == [
        "dataset.numWorkers default -> 1",
        "dataset.numWorkers 1 -> 0",
    ]


def test_container_limits_of_a_command_can_be_raised() -> None:
    limits = {"limits": {"memory": "1Gi"}}
    job_spec = job(**command({"script": "a.py"}), resources=limits, restartPolicy={"maxMemory": "2Gi"}).spec

    assert list_repair_descriptions(job_spec, reason=HOST, batch=None) == ["resources.limits.memory 1Gi -> 2Gi"]
    assert list_repair_descriptions(job_spec, reason=SHM, batch=None) == ["shmSize 512Mi -> 1Gi"]


@pytest.mark.parametrize(
    ("job_spec", "reason", "fields", "advice"),
    [
        pytest.param(
            build_spec_with_memory_limit(),
            HOST,
            {},
            "the limit was 16Gi: raise resources.limits.memory (restartPolicy.maxMemory lets the operator do so), or"
            " start fewer loader processes (dataset.numWorkers)",
            id="limit without maxMemory",
        ),
        pytest.param(
            build_spec_with_memory_limit(restartPolicy={"maxMemory": "64Gi"}),
            HOST,
            {"repair": Repair(memory="64Gi")},
            "the limit was 64Gi: raise resources.limits.memory, or start fewer loader processes (dataset.numWorkers)",
            id="limit raised before",
        ),
        pytest.param(
            build_single_rank_spec(),
            HOST,
            {},
            "no limit was set and the Kubernetes node had no more: set resources.requests.memory, or start fewer loader"
            " processes (dataset.numWorkers)",
            id="no limit",
        ),
        pytest.param(
            job(**command({"script": "a.py"})).spec,
            SHM,
            {"batch": None},
            "shared memory had no other limit than the memory of the Kubernetes node: start fewer loader processes",
            id="shared memory without a size",
        ),
        pytest.param(
            job(**command({"script": "a.py"}), shmSize="2Gi").spec,
            SHM,
            {"batch": None},
            "shared memory had 2Gi: raise shmSize, or start fewer loader processes",
            id="command",
        ),
        pytest.param(
            build_spec_with_memory_limit(),
            SHM,
            {"runs_in_container": False},
            "start fewer loader processes (dataset.numWorkers), or use a host with more memory",
            id="no container",
        ),
    ],
)
def test_advice_contains_the_current_limit(
    job_spec: FineTuneJobSpec, reason: Reason, fields: dict[str, Any], advice: str
) -> None:
    assert build_memory_advice(build_shortage(job_spec, reason=reason, **fields)) == advice


def test_max_memory_must_be_at_least_the_memory_limit() -> None:
    with pytest.raises(ValidationError, match=r"maxMemory raises resources.limits.memory, which is not set"):
        build_single_rank_spec(restartPolicy={"maxMemory": "64Gi"})
    with pytest.raises(ValidationError, match=r"maxMemory \(8Gi\) is less than resources.limits.memory \(16Gi\)"):
        build_spec_with_memory_limit(restartPolicy={"maxMemory": "8Gi"})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        pytest.param({"deepspeed": "zero4"}, "deepspeed", id="preset of a newer release"),
        pytest.param({"memory": "lots"}, "'lots' is not a quantity", id="memory"),
        pytest.param({"memory": ""}, "'' is not a quantity", id="empty memory"),
        pytest.param({"shmSize": "x" * 5000}, "'xxx", id="shared memory"),
        pytest.param({"gradientAccumulationSteps": 0}, "gradient_accumulation_steps", id="accumulation steps"),
        pytest.param({"numWorkers": -1}, "num_workers", id="data loader processes"),
        pytest.param({"perDeviceTrainBatchSize": 2**53}, "per_device_train_batch_size", id="micro-batch"),
    ],
)
def test_repair_of_another_release_is_explained(fields: dict[str, Any], field: str) -> None:
    explanation = explain_unsupported_repair(Repair.model_validate(fields))

    assert field in explanation
    assert len(explanation) < 300


def test_every_repair_of_this_release_is_supported() -> None:
    repair = Repair(
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        deepspeed="zero3_offload",
        memory="2Gi",
        shm_size="1G",
        num_workers=0,
    )

    assert not explain_unsupported_repair(repair)
    assert not explain_unsupported_repair(None)


@pytest.mark.parametrize(
    ("size", "smaller"), [(2, 1), (7, 1), (12, 6), (15, 5), (49, 7), (16_777_213, 1), (2**24, 2**23)]
)
def test_micro_batch_is_reduced_to_its_largest_proper_divisor(size: int, smaller: int) -> None:
    """A large prime size, which a user can choose by globalBatchSize, must not delay the pass."""
    shortage = replace(build_shortage(build_single_rank_spec()), batch=Batch(size, 3, 1))
    started_at = time.process_time()
    found = find_next_repair(shortage)

    assert found is not None
    assert found[0].per_device_train_batch_size == smaller
    assert found[0].gradient_accumulation_steps == 3 * size // smaller
    assert time.process_time() - started_at < 0.1
