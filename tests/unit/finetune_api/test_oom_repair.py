"""What is changed when memory ran out: the ladder from the cheapest change to the last."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from finetune_api.batch import Batch, resolve_batch
from finetune_api.oom_repair import Shortage, advise, apply_repair, next_repair
from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Repair
from testing.builders.jobs import command, job
from testing.builders.jobs import spec as build_spec


def spec(**fields: Any) -> FineTuneJobSpec:
    """One rank per node."""
    return FineTuneJobSpec.model_validate(build_spec(**{"nprocPerNode": 1, **fields}))


def batch_of(of: FineTuneJobSpec) -> Batch:
    training = of.training
    return resolve_batch(
        per_device=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        effective=training.global_batch_size,
        world_size=of.world_size,
    )


def shortage(
    of: FineTuneJobSpec, repair: Repair | None = None, *, reason: Reason = Reason.CUDA_OUT_OF_MEMORY, **fields: Any
) -> Shortage:
    batch = fields.pop("batch") if "batch" in fields else batch_of(apply_repair(of, repair))
    return Shortage(reason, of, repair, batch, **fields)


def ladder(of: FineTuneJobSpec, **fields: Any) -> list[str]:
    """All repairs in words, one after the other."""
    repair: Repair | None = None
    told = []
    while found := next_repair(shortage(of, repair, **fields)):
        repair, said = found
        told.append(said)
    return told


def test_full_tuning_is_repaired_in_the_order_of_what_it_costs() -> None:
    of = spec(lora=None, numNodes=2, training={"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 3})

    assert ladder(of) == [
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
    ("fields", "last"),
    [
        pytest.param({"lora": {}, "numNodes": 2}, ["none -> zero3", "zero3 -> zero3_offload"], id="lora"),
        pytest.param({"lora": {}, "numNodes": 1}, [], id="one rank has nobody to share with"),
        pytest.param({"lora": {"quantization": "nf4"}, "numNodes": 2}, [], id="4-bit weights do not spread"),
        pytest.param({"lora": {}, "numNodes": 2, "training": {"probe": True}}, [], id="DeepSpeed allows no probe"),
        pytest.param({"numNodes": 2, "fsdp": {}}, [], id="the user chose FSDP2"),
        pytest.param(
            {"numNodes": 2, "deepspeed": {"config": {"zero_optimization": {"stage": 1}}}},
            [],
            id="a config of one's own",
        ),
        pytest.param(
            {"lora": None, "numNodes": 2, "deepspeed": {"preset": "zero2_offload"}},
            ["zero2_offload -> zero3", "zero3 -> zero3_offload"],
            id="from where the user began",
        ),
    ],
)
def test_memory_is_spread_as_far_as_the_job_allows(fields: dict[str, Any], last: list[str]) -> None:
    training = {"gradientCheckpointing": True, **fields.get("training", {})}
    env = [{"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "max_split_size_mb:128"}]

    told = ladder(spec(**{**fields, "training": training, "env": env}))

    assert told == [f"deepspeed preset {step}" for step in last]


def test_a_program_of_the_users_own_cannot_be_repaired() -> None:
    assert ladder(job(**command({"script": "a.py"})).spec, batch=None) == []


def test_nothing_changes_without_a_repair() -> None:
    of = spec()

    assert apply_repair(of, None) is of


@given(
    per_device=st.integers(1, 200),
    accumulation=st.none() | st.integers(1, 50),
    nodes=st.integers(1, 8),
    with_global=st.booleans(),
    lora=st.booleans(),
)
def test_the_effective_batch_survives_every_repair_and_repairs_end(
    per_device: int, accumulation: int | None, nodes: int, with_global: bool, lora: bool
) -> None:
    training: dict[str, Any] = {"perDeviceTrainBatchSize": per_device}
    if accumulation is not None:
        training["gradientAccumulationSteps"] = accumulation
    if with_global:
        training["globalBatchSize"] = per_device * (accumulation or 1) * nodes
    of = spec(numNodes=nodes, lora={} if lora else None, training=training)
    effective = batch_of(of).effective
    repair: Repair | None = None

    for _ in range(20):
        found = next_repair(shortage(of, repair))
        if found is None:
            break
        assert found[0] != repair
        repair = found[0]
        repaired = apply_repair(of, repair)
        assert batch_of(repaired).effective == effective
        FineTuneJobSpec.model_validate_json(repaired.model_dump_json(by_alias=True, exclude_unset=True))
    else:
        pytest.fail("twenty repairs and no end")
    assert batch_of(apply_repair(of, repair)).per_device == 1


def test_what_auto_came_to_is_repaired_by_a_number() -> None:
    of = spec(numNodes=2, training={"globalBatchSize": 24, "perDeviceTrainBatchSize": "auto"})

    repair, said = next_repair(shortage(of, batch=Batch(6, 2, 2))) or (None, "")

    assert said == "perDeviceTrainBatchSize 6 -> 3, gradientAccumulationSteps 2 -> 4 (effective batch stays 24)"
    assert batch_of(apply_repair(of, repair)) == Batch(3, 4, 2)
    assert not apply_repair(of, repair).training.chooses_batch


def test_one_sample_at_a_time_is_repaired_by_other_means_and_auto_tries_again() -> None:
    of = spec(numNodes=2, training={"globalBatchSize": 24, "perDeviceTrainBatchSize": "auto"})

    repair, said = next_repair(shortage(of, batch=Batch(1, 12, 2))) or (None, "")

    assert said == "gradientCheckpointing: true"
    assert apply_repair(of, repair).training.chooses_batch


HOST = Reason.HOST_OUT_OF_MEMORY
SHM = Reason.SHARED_MEMORY_EXHAUSTED


def limited(memory: str = "16Gi", **fields: Any) -> FineTuneJobSpec:
    return spec(**{"resources": {"limits": {"memory": memory}}, **fields})


def test_memory_is_doubled_up_to_what_the_user_allows_and_then_loaders_become_fewer() -> None:
    of = limited(restartPolicy={"maxMemory": "50Gi"})

    assert ladder(of, reason=HOST) == [
        "resources.limits.memory 16Gi -> 32Gi",
        "resources.limits.memory 32Gi -> 50Gi",
        "dataset.numWorkers default -> 1",
        "dataset.numWorkers 1 -> 0",
    ]


@pytest.mark.parametrize(
    ("of", "fields"),
    [
        pytest.param(limited(), {}, id="none is allowed"),
        pytest.param(limited(restartPolicy={"maxMemory": "16Gi"}), {}, id="it is used up"),
        pytest.param(limited(restartPolicy={"maxMemory": "32Gi"}), {"in_container": False}, id="no container"),
        pytest.param(spec(), {}, id="no limit"),
    ],
)
def test_memory_that_may_not_be_raised_is_saved(of: FineTuneJobSpec, fields: dict[str, Any]) -> None:
    assert ladder(of, reason=HOST, **fields)[0] == "dataset.numWorkers default -> 1"


def test_a_request_that_equals_the_limit_grows_with_it() -> None:
    same, less = ({"limits": {"memory": "2Gi"}, "requests": {"memory": request}} for request in ("2Gi", "1Gi"))
    repair = Repair(memory="4Gi")

    for resources, request in ((same, "4Gi"), (less, "1Gi")):
        grown = apply_repair(spec(resources=resources), repair).resources
        assert (grown.limits["memory"], grown.requests["memory"]) == ("4Gi", request)


@pytest.mark.parametrize(
    ("of", "first"),
    [
        pytest.param(spec(), "shmSize 2Gi -> 4Gi", id="default without a limit"),
        pytest.param(limited("3Gi"), "shmSize 1536Mi -> 3Gi", id="half of the limit, then all of it"),
        pytest.param(limited(shmSize="12Gi"), "shmSize 12Gi -> 16Gi", id="never more than the limit"),
    ],
)
def test_shared_memory_becomes_larger_once_and_then_loaders_become_fewer(of: FineTuneJobSpec, first: str) -> None:
    assert ladder(of, reason=SHM) == [first, "dataset.numWorkers default -> 1", "dataset.numWorkers 1 -> 0"]


def test_a_program_of_the_users_own_gets_what_its_container_can_get() -> None:
    limits = {"limits": {"memory": "1Gi"}}
    of = job(**command({"script": "a.py"}), resources=limits, restartPolicy={"maxMemory": "2Gi"}).spec

    assert ladder(of, reason=HOST, batch=None) == ["resources.limits.memory 1Gi -> 2Gi"]
    assert ladder(of, reason=SHM, batch=None) == ["shmSize 512Mi -> 1Gi"]


@pytest.mark.parametrize(
    ("of", "reason", "fields", "advice"),
    [
        pytest.param(
            limited(),
            HOST,
            {},
            "the limit was 16Gi: raise resources.limits.memory (restartPolicy.maxMemory lets the operator do so), or"
            " start fewer loader processes (dataset.numWorkers)",
            id="limit",
        ),
        pytest.param(
            limited(restartPolicy={"maxMemory": "64Gi"}),
            HOST,
            {"repair": Repair(memory="64Gi")},
            "the limit was 64Gi: raise resources.limits.memory, or start fewer loader processes (dataset.numWorkers)",
            id="raised already",
        ),
        pytest.param(
            spec(),
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
            "shared memory had 2Gi: raise shmSize, or start fewer loader processes",
            id="command",
        ),
        pytest.param(
            limited(),
            SHM,
            {"in_container": False},
            "start fewer loader processes (dataset.numWorkers), or use a machine with more memory",
            id="no container",
        ),
    ],
)
def test_advice_names_what_there_was(of: FineTuneJobSpec, reason: Reason, fields: dict[str, Any], advice: str) -> None:
    assert advise(shortage(of, reason=reason, **fields)) == advice


def test_memory_that_can_grow_has_a_limit_to_grow_from() -> None:
    with pytest.raises(ValidationError, match=r"maxMemory raises resources.limits.memory, which is not set"):
        spec(restartPolicy={"maxMemory": "64Gi"})
    with pytest.raises(ValidationError, match=r"maxMemory \(8Gi\) is less than resources.limits.memory \(16Gi\)"):
        limited(restartPolicy={"maxMemory": "8Gi"})
