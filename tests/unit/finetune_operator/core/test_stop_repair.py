"""Tests of repairs after an out-of-memory failure."""

import json
from typing import Any

import pytest

from finetune_api.v1alpha1.repair import Repair
from finetune_api.v1alpha1.status import Fault, Phase, Progress
from finetune_operator.core.actions import Create
from testing.builders.jobs import command, decide_with, finished_pod, running_pod
from testing.builders.stopping import VICTIM, build_running_job, termination_message


def test_micro_batch_is_halved_after_a_gpu_out_of_memory_failure() -> None:
    ftjob = build_running_job(training={"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 2})
    message = termination_message(
        error_type="CudaOutOfMemory", message="ran out of GPU memory at step 37 with ...", rank=1
    )
    ftjob, _ = decide_with(ftjob, finished_pod(ftjob, 0, message=message), finished_pod(ftjob, 1, **VICTIM))
    ftjob, _ = decide_with(ftjob, finished_pod(ftjob, 0, message=message), finished_pod(ftjob, 1, **VICTIM))

    old, new = ftjob.status.attempts
    assert (old.reason, old.fault, old.action) == ("CudaOutOfMemory", Fault.RESOURCE, "Repair")
    assert old.message == (
        "node 0 (gpu-0) rank 1 ran out of GPU memory at step 37 with ...; retried with perDeviceTrainBatchSize 4 -> 2,"
        " gradientAccumulationSteps 2 -> 4 (effective batch stays 32)"
    )
    assert (new.attempt, new.not_before) == (1, None)
    assert ftjob.status.repair == Repair(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert ftjob.status.batch is not None
    assert (ftjob.status.batch.per_device_train_batch_size, ftjob.status.batch.effective) == (2, 32)
    (config,) = (a.manifest for a in decide_with(ftjob)[1].actions if isinstance(a, Create) and "data" in a.manifest)
    training = json.loads(config["data"]["job.json"])["training"]
    assert training == {"perDeviceTrainBatchSize": 2, "gradientAccumulationSteps": 4}


def test_memory_limit_is_raised_after_a_host_out_of_memory_failure() -> None:
    limits = {"limits": {"cpu": 4, "memory": "2Gi"}}
    ftjob = build_running_job(
        numNodes=1, resources=limits, restartPolicy={"maxMemory": "3Gi"}, **command({"script": "train.py"})
    )
    oom_killed = finished_pod(ftjob, 0, reason="OOMKilled", exit_code=137)
    ftjob, _ = decide_with(ftjob, oom_killed)
    ftjob, _ = decide_with(ftjob, oom_killed)

    old = ftjob.status.attempts[0]
    assert (old.reason, old.action) == ("HostOutOfMemory", "Repair")
    assert old.message.endswith("host memory at step 0; retried with resources.limits.memory 2Gi -> 3Gi")
    (pod,) = (
        a.manifest for a in decide_with(ftjob)[1].actions if isinstance(a, Create) and a.manifest["kind"] == "Pod"
    )
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"cpu": 4, "memory": "3Gi"}}
    assert {"medium": "Memory", "sizeLimit": str(3 * 2**29)} in [v.get("emptyDir") for v in pod["spec"]["volumes"]]

    oom_killed = finished_pod(ftjob, 0, attempt=1, reason="OOMKilled", exit_code=137)
    ftjob, _ = decide_with(ftjob, oom_killed)
    ftjob, _ = decide_with(ftjob, oom_killed)
    assert ftjob.status.phase is Phase.FAILED
    assert "the limit was 3Gi: raise resources.limits.memory, or start fewer" in ftjob.status.attempts[-1].message


@pytest.mark.parametrize(
    ("reported_progress", "description", "repair"),
    [
        pytest.param(
            Progress(step=36, per_device_train_batch_size=4),
            "perDeviceTrainBatchSize 4 -> 2, gradientAccumulationSteps 2 -> 4 (effective batch stays 32)",
            Repair(per_device_train_batch_size=2, gradient_accumulation_steps=4),
            id="reported size is halved",
        ),
        pytest.param(
            None, "gradientCheckpointing: true", Repair(gradient_checkpointing=True), id="no size reported yet"
        ),
    ],
)
def test_repair_of_an_automatic_batch_starts_from_the_reported_size(
    reported_progress: Progress | None, description: str, repair: Repair
) -> None:
    ftjob = build_running_job(training={"perDeviceTrainBatchSize": "auto", "globalBatchSize": 32})
    assert ftjob.status.batch is None
    last_message = termination_message(
        error_type="CudaOutOfMemory", message="ran out of GPU memory", rank=2, node_rank=1, progress=reported_progress
    )
    ftjob, _ = decide_with(ftjob, finished_pod(ftjob, 0, **VICTIM), finished_pod(ftjob, 1, message=last_message))
    ftjob, _ = decide_with(ftjob)  # all pods have been deleted

    assert ftjob.status.attempts[0].message.endswith(f"retried with {description}")
    assert ftjob.status.repair == repair


def test_repair_of_an_automatic_batch_ignores_a_polled_size() -> None:
    ftjob = build_running_job(training={"perDeviceTrainBatchSize": "auto", "globalBatchSize": 32}, numNodes=1)
    polled = Progress(step=36, per_device_train_batch_size=4)
    failed = finished_pod(
        ftjob, 0, message=termination_message(error_type="CudaOutOfMemory", message="ran out", rank=0)
    )
    for pods in ((running_pod(ftjob, 0),), (failed,), (failed,)):
        ftjob, _ = decide_with(ftjob, *pods, progress=polled)

    assert ftjob.status.batch is not None  # for people
    assert ftjob.status.repair == Repair(gradient_checkpointing=True)


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        pytest.param(
            {
                "training": {"gradientCheckpointing": True},
                "numNodes": 1,
                "nprocPerNode": 1,
                "env": [{"name": "PYTORCH_CUDA_ALLOC_CONF"}],
            },
            "shorten the rows (dataset.maxLength), or use larger or more GPUs",
            id="no change left",
        ),
        pytest.param(
            {"restartPolicy": {"maxRestarts": 0}, "numNodes": 1},
            "use smaller batches, or larger or more GPUs",
            id="no restarts allowed",
        ),
        pytest.param(
            command({"script": "train.py"}) | {"numNodes": 1},
            "use smaller batches, or larger or more GPUs",
            id="command",
        ),
    ],
)
def test_out_of_memory_failure_without_a_repair_fails_the_job_with_advice(fields: dict[str, Any], advice: str) -> None:
    ftjob = build_running_job(**fields)
    message = termination_message(error_type="OutOfMemoryError", message="CUDA out of memory. Tried ...", rank=0)
    ftjob, _ = decide_with(ftjob, finished_pod(ftjob, 0, message=message))
    ftjob, _ = decide_with(ftjob, finished_pod(ftjob, 0, message=message))

    assert ftjob.status.phase is Phase.FAILED
    assert ftjob.status.attempts[-1].message.endswith(advice)
    assert ftjob.status.repair is None
