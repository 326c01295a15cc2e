"""Stopping an attempt: deletion of its pods, evidence, root cause, verdict and repair."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.termination import Outcome, Termination
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, Fault, JobStatus, Phase, Progress, Repair
from finetune_operator import names
from finetune_operator.core.actions import Create, DeletePod
from finetune_operator.core.stop_attempt import ABORT_GRACE_SECONDS, ROOT_CAUSE_GRACE
from finetune_operator.plan.manifests import GRACE_SECONDS
from testing.builders.jobs import (
    NOW,
    RawBody,
    command,
    decide_once,
    ended_pod,
    job,
    observation_of,
    pod,
    running_pod,
    terminating_pod,
)

KILLED: RawBody = {"exit_code": 137, "finishedAt": "2026-01-01T12:00:00Z"}
LATER = NOW + timedelta(seconds=2)


def termination_message(**fields: Any) -> str:
    """Return a termination message of a supervisor as JSON."""
    message = Termination(**{"final": True, "outcome": Outcome.FAILED, "time": NOW.timestamp() + 0.4, **fields})
    return message.model_dump_json(by_alias=True)


VICTIM: RawBody = {"message": termination_message(error_type="DistBackendError", message="Connection closed by peer")}


def disrupted_pod(body: RawBody, reason: str) -> RawBody:
    """Return the pod with a DisruptionTarget condition."""
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
    return {**body, "status": {**body["status"], "conditions": conditions}}


def pod_restarted_in_place(ftjob: FineTuneJob, node_rank: int, **terminated: Any) -> RawBody:
    """Return a pod whose container the kubelet restarted in place."""
    [status] = ended_pod(ftjob, node_rank, **terminated)["status"]["containerStatuses"]
    body = running_pod(ftjob, node_rank)
    body["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": status["state"]}
    return body


def running_job(**fields: Any) -> FineTuneJob:
    """Return a job whose first attempt is running."""
    ftjob = job(**fields)
    ftjob, _ = decide_once(ftjob, observation_of(ftjob))
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, *(running_pod(ftjob, rank) for rank in range(ftjob.spec.num_nodes)))
    )
    assert ftjob.status.attempts[-1].state is AttemptState.RUNNING
    return ftjob


def test_a_root_cause_observed_after_its_victim_is_still_the_root_cause() -> None:
    ftjob = running_job()
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **VICTIM), running_pod(ftjob, 1)), now=LATER
    )
    ftjob, _ = decide_once(
        ftjob,
        observation_of(ftjob, ended_pod(ftjob, 0, **VICTIM), terminating_pod(ended_pod(ftjob, 1, **KILLED))),
        now=LATER,
    )

    assert (ftjob.status.attempts[0].reason, ftjob.status.attempts[0].node_rank) == ("ContainerKilled", 1)


def test_a_pod_without_labels_is_deleted_with_the_others_before_the_verdict() -> None:
    ftjob = running_job()
    unlabelled_pod = running_pod(ftjob, 1)
    del unlabelled_pod["metadata"]["labels"][names.JOB_UID]
    unconfirmed = decide_once(ftjob, observation_of(ftjob, running_pod(ftjob, 0), fresh=False), now=LATER)[1]
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, running_pod(ftjob, 0), unlabelled_pod), now=LATER)
    stopping = decide_once(ftjob, observation_of(ftjob, running_pod(ftjob, 0), unlabelled_pod), now=LATER)[1]
    ftjob, waiting = decide_once(
        ftjob,
        observation_of(ftjob, terminating_pod(unlabelled_pod), gone=(terminating_pod(running_pod(ftjob, 0)),)),
        now=LATER,
    )
    state_with_pod = ftjob.status.attempts[-1].state
    ftjob, _ = decide_once(ftjob, observation_of(ftjob), now=LATER)

    assert unconfirmed.needs_confirmation
    assert [action.name for action in stopping.actions if isinstance(action, DeletePod)] == ["bert-0-0", "bert-0-1"]
    assert (state_with_pod, waiting.requeue_after is not None) == (AttemptState.STOPPING, True)
    assert (ftjob.status.attempts[0].reason, ftjob.status.attempts[0].node_rank) == ("PodDeleted", 1)
    assert "pod bert-0-1 lost its labels" in ftjob.status.attempts[0].message


STOPPED: RawBody = {"message": termination_message(outcome=Outcome.STOPPED), "finishedAt": "2026-01-01T12:00:00Z"}


@pytest.mark.parametrize("observed_late", [False, True], ids=["observed first", "observed after its victim"])
def test_a_container_restarted_in_place_is_the_root_cause_and_is_deleted(observed_late: bool) -> None:
    ftjob = running_job()
    restarted_pod = pod_restarted_in_place(ftjob, 1, exit_code=143, **STOPPED)
    other = ended_pod(ftjob, 0, **VICTIM)
    observations = [(other, running_pod(ftjob, 1))] if observed_late else [(running_pod(ftjob, 0), restarted_pod)]
    for pods in (*observations, (other, restarted_pod)):
        ftjob, decision = decide_once(ftjob, observation_of(ftjob, *pods), now=LATER)
    ftjob, decision = decide_once(ftjob, observation_of(ftjob, other, restarted_pod), now=NOW + timedelta(seconds=10))
    assert [action.name for action in decision.actions if isinstance(action, DeletePod)] == ["bert-0-1"]

    broken = ended_pod(ftjob, 1, exit_code=128, reason="StartError", message='exec: "python3": not found')
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, other, broken), now=LATER)
    first = ftjob.status.attempts[0]
    assert (first.reason, first.node_rank, first.fault) == ("PodDeleted", 1, Fault.INFRASTRUCTURE)
    assert "pod bert-0-1 was restarted in place" in first.message


def test_a_node_killed_after_its_grace_period_is_not_the_root_cause() -> None:
    late_failure: RawBody = {"exit_code": 137, "finishedAt": "2026-01-01T12:00:12Z"}
    ftjob = running_job()
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **VICTIM), running_pod(ftjob, 1)), now=LATER
    )
    stopped_pod = terminating_pod(ended_pod(ftjob, 1, **late_failure), deadline=NOW + timedelta(seconds=12))
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **VICTIM), stopped_pod), now=LATER)

    assert ftjob.status.attempts[0].reason == "PeerLost"


def test_a_pod_deleted_by_a_user_is_the_root_cause_although_its_ranks_report_lost_peers() -> None:
    ftjob = running_job()
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, terminating_pod(running_pod(ftjob, 0)), running_pod(ftjob, 1)))
    ftjob, _ = decide_once(
        ftjob,
        observation_of(
            ftjob, terminating_pod(ended_pod(ftjob, 0, **VICTIM)), terminating_pod(ended_pod(ftjob, 1, **VICTIM))
        ),
        now=LATER,
    )

    assert (ftjob.status.attempts[0].reason, ftjob.status.attempts[0].node_rank) == ("PodDeleted", 0)


def test_a_lost_kubernetes_node_is_the_root_cause_without_a_termination_message() -> None:
    ftjob = running_job()
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **VICTIM), running_pod(ftjob, 1)), now=LATER
    )
    lost_pod = disrupted_pod(terminating_pod(running_pod(ftjob, 1), deadline=LATER), "DeletionByTaintManager")
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **VICTIM), lost_pod), now=LATER + timedelta(seconds=60)
    )

    assert (ftjob.status.attempts[0].reason, ftjob.status.attempts[0].fault) == ("NodeLost", Fault.INFRASTRUCTURE)


def test_an_eviction_after_our_deletion_is_not_the_root_cause() -> None:
    ftjob = running_job()
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **VICTIM), running_pod(ftjob, 1)), now=LATER
    )
    late_failure: RawBody = {"exit_code": 143, "message": termination_message(outcome=Outcome.STOPPED)}
    evicted_pod = disrupted_pod(terminating_pod(ended_pod(ftjob, 1, **late_failure)), "EvictionByEvictionAPI")
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **VICTIM), evicted_pod), now=LATER)

    assert ftjob.status.attempts[0].reason == "PeerLost"


def test_evidence_outlasts_its_pod() -> None:
    ftjob = running_job()
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **KILLED), running_pod(ftjob, 1)), now=LATER
    )
    ftjob, _ = decide_once(ftjob, observation_of(ftjob), now=LATER)

    assert ftjob.status.attempts[0].reason == "ContainerKilled"


def test_a_missing_pod_is_evidence_of_its_deletion() -> None:
    ftjob = running_job()
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, running_pod(ftjob, 0)))
    ftjob, _ = decide_once(ftjob, observation_of(ftjob))

    assert (ftjob.status.attempts[0].reason, ftjob.status.attempts[0].node_rank) == ("PodDeleted", 1)


def test_success_of_every_node_overrides_the_stop_reason() -> None:
    success: RawBody = {"exit_code": 0, "message": termination_message(outcome=Outcome.SUCCEEDED)}
    ftjob = running_job()
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, running_pod(ftjob, 0), terminating_pod(running_pod(ftjob, 1))))
    ftjob, _ = decide_once(
        ftjob,
        observation_of(ftjob, ended_pod(ftjob, 0, **success), terminating_pod(ended_pod(ftjob, 1, **success))),
        now=LATER,
    )

    assert ftjob.status.attempts[0].state is AttemptState.SUCCEEDED
    assert ftjob.status.completion_time == LATER


@pytest.mark.parametrize(
    ("first", "grace_seconds"),
    [
        pytest.param(lambda ftjob: terminating_pod(running_pod(ftjob, 1)), GRACE_SECONDS, id="drained node"),
        pytest.param(lambda ftjob: ended_pod(ftjob, 1, **KILLED), ABORT_GRACE_SECONDS, id="failed node"),
    ],
)
def test_the_grace_period_of_other_pods_depends_on_the_stop_reason(first: Any, grace_seconds: int) -> None:
    ftjob = running_job()
    pods = (running_pod(ftjob, 0), first(ftjob))
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, *pods))
    _, decision = decide_once(ftjob, observation_of(ftjob, *pods))

    assert [a.grace_seconds for a in decision.actions if isinstance(a, DeletePod)] == [grace_seconds]


def test_after_a_victim_the_root_cause_has_a_grace_period_to_end_by_itself() -> None:
    """A root cause that receives SIGTERM first reports that it was stopped, and its victim would be blamed."""
    ftjob = running_job()
    pods = (ended_pod(ftjob, 0, **VICTIM), running_pod(ftjob, 1))
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, *pods))
    ftjob, during_grace = decide_once(ftjob, observation_of(ftjob, *pods), now=LATER)
    _, after_grace = decide_once(ftjob, observation_of(ftjob, *pods), now=LATER + ROOT_CAUSE_GRACE)
    ftjob, _ = decide_once(
        ftjob,
        observation_of(ftjob, pods[0], ended_pod(ftjob, 1, message=termination_message(error_type="ValueError"))),
        now=LATER,
    )

    assert during_grace.actions == ()
    assert during_grace.requeue_after == timedelta(seconds=1.4)  # the victim ended at 0.4 s
    assert after_grace.actions == (DeletePod("bert-0-1", "pod-0-1", ABORT_GRACE_SECONDS),)
    assert (ftjob.status.attempts[0].reason, ftjob.status.attempts[0].node_rank) == ("UserCodeError", 1)


def test_a_failure_during_a_drain_shortens_the_grace_period_of_the_other_pods() -> None:
    ftjob = running_job()
    pods = (
        terminating_pod(running_pod(ftjob, 0), deadline=NOW + timedelta(seconds=GRACE_SECONDS)),
        terminating_pod(running_pod(ftjob, 1)),
    )
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, *pods))
    _, decision = decide_once(ftjob, observation_of(ftjob, pods[0], ended_pod(ftjob, 1, **VICTIM)))

    assert decision.actions == (DeletePod("bert-0-0", "pod-0-0", ABORT_GRACE_SECONDS),)


def test_the_next_attempt_begins_once_a_lost_kubernetes_node_is_fenced() -> None:
    ftjob = running_job()
    lost_pod = disrupted_pod(terminating_pod(running_pod(ftjob, 1), deadline=NOW), "DeletionByTaintManager")
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **KILLED), lost_pod))
    waiting, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **KILLED), lost_pod), now=NOW + timedelta(seconds=29)
    )
    after_fencing, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **KILLED), lost_pod), now=NOW + timedelta(seconds=30)
    )

    assert (waiting.status.attempt, after_fencing.status.attempt) == (0, 1)


def test_a_kubernetes_node_with_a_fast_clock_does_not_delay_the_stop() -> None:
    ahead = ended_pod(
        ftjob := running_job(),
        0,
        message=termination_message(error_type="DistBackendError", time=NOW.timestamp() + 3600),
    )
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, ahead, running_pod(ftjob, 1)))
    _, decision = decide_once(ftjob, observation_of(ftjob, ahead, running_pod(ftjob, 1)))

    assert decision.actions == (DeletePod("bert-0-1", "pod-0-1", ABORT_GRACE_SECONDS),)


def test_only_pods_on_reachable_kubernetes_nodes_get_the_full_grace_period() -> None:
    """A lost Kubernetes node does not stop its pod; a long grace period there delays the restart until fencing."""
    ftjob = running_job()
    lost_pod = disrupted_pod(
        terminating_pod(running_pod(ftjob, 1), deadline=NOW + timedelta(seconds=GRACE_SECONDS)),
        "DeletionByTaintManager",
    )
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, running_pod(ftjob, 0), lost_pod))
    _, decision = decide_once(ftjob, observation_of(ftjob, running_pod(ftjob, 0), lost_pod))

    assert decision.actions == (
        DeletePod("bert-0-0", "pod-0-0", GRACE_SECONDS),
        DeletePod("bert-0-1", "pod-0-1", ABORT_GRACE_SECONDS),
    )


def test_the_verdict_and_the_next_attempt_are_in_one_status_write() -> None:
    ftjob = running_job()
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **KILLED), ended_pod(ftjob, 1, **VICTIM)))
    before: JobStatus = ftjob.status
    ftjob, decision = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **KILLED), ended_pod(ftjob, 1, **VICTIM))
    )

    assert (before.attempt, before.attempts[-1].state) == (0, AttemptState.STOPPING)
    assert [(r.attempt, r.state) for r in ftjob.status.attempts] == [
        (0, AttemptState.FAILED),
        (1, AttemptState.STARTING),
    ]
    assert (ftjob.status.attempt, ftjob.status.restarts) == (1, 1)
    assert {type(action).__name__ for action in decision.actions} == {"Emit"}


def test_a_passed_deadline_does_not_requeue_a_stopping_job_at_once() -> None:
    ftjob = running_job(activeDeadlineSeconds=60)
    after_deadline = NOW + timedelta(seconds=61)
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1)), now=after_deadline
    )
    _, decision = decide_once(
        ftjob, observation_of(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1)), now=after_deadline
    )

    assert ftjob.status.attempts[-1].reason == "DeadlineExceeded"
    assert decision.requeue_after is not None
    assert decision.requeue_after > timedelta(seconds=1)


def test_a_pod_deleted_before_all_pods_were_created_ends_the_attempt() -> None:
    ftjob = job()
    ftjob, _ = decide_once(ftjob, observation_of(ftjob))
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, pod(ftjob, 0), gone=(pod(ftjob, 1),)))

    assert ftjob.status.attempts[-1].state is AttemptState.STOPPING


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param(None, "the command ended with exit 0 on every node", id="without an output"),
        pytest.param(
            {"persistentVolumeClaim": {"claimName": "models"}},
            "the command ended with exit 0 on every node; files written to FINETUNE_OUTPUT are in models:default/bert",
            id="with an output",
        ),
    ],
)
def test_a_command_is_complete_when_every_node_succeeded(output: Any, message: str) -> None:
    ftjob = running_job(**command({"script": "train.py"}, output=output))
    success: RawBody = {"exit_code": 0, "message": termination_message(outcome=Outcome.SUCCEEDED)}
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **success), ended_pod(ftjob, 1, **success)))

    assert (ftjob.status.phase, ftjob.status.attempts[-1].message) == (Phase.COMPLETE, message)
    assert ftjob.status.batch is None
    assert ftjob.status.output == ("models:default/bert" if output else None)


def test_after_a_gpu_out_of_memory_failure_the_micro_batch_is_halved() -> None:
    ftjob = running_job(training={"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 2})
    message = termination_message(
        error_type="CudaOutOfMemory", message="ran out of GPU memory at step 37 with ...", rank=1
    )
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, message=message), ended_pod(ftjob, 1, **VICTIM))
    )
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, message=message), ended_pod(ftjob, 1, **VICTIM))
    )

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
    (config,) = (
        a.manifest
        for a in decide_once(ftjob, observation_of(ftjob))[1].actions
        if isinstance(a, Create) and "data" in a.manifest
    )
    training = json.loads(config["data"]["job.json"])["training"]
    assert training == {"perDeviceTrainBatchSize": 2, "gradientAccumulationSteps": 4}


def test_after_a_host_out_of_memory_failure_the_limit_is_raised_up_to_max_memory() -> None:
    limits = {"limits": {"cpu": 4, "memory": "2Gi"}}
    ftjob = running_job(
        numNodes=1, resources=limits, restartPolicy={"maxMemory": "3Gi"}, **command({"script": "train.py"})
    )
    oom_killed = ended_pod(ftjob, 0, reason="OOMKilled", exit_code=137)
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, oom_killed))
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, oom_killed))

    old = ftjob.status.attempts[0]
    assert (old.reason, old.action) == ("HostOutOfMemory", "Repair")
    assert old.message.endswith("host memory at step 0; retried with resources.limits.memory 2Gi -> 3Gi")
    (pod,) = (
        a.manifest
        for a in decide_once(ftjob, observation_of(ftjob))[1].actions
        if isinstance(a, Create) and a.manifest["kind"] == "Pod"
    )
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"cpu": 4, "memory": "3Gi"}}
    assert {"medium": "Memory", "sizeLimit": str(3 * 2**29)} in [v.get("emptyDir") for v in pod["spec"]["volumes"]]

    oom_killed = ended_pod(ftjob, 0, attempt=1, reason="OOMKilled", exit_code=137)
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, oom_killed))
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, oom_killed))
    assert ftjob.status.phase is Phase.FAILED
    assert "the limit was 3Gi: raise resources.limits.memory, or start fewer" in ftjob.status.attempts[-1].message


@pytest.mark.parametrize(
    ("reported", "description", "repair"),
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
def test_the_repair_of_auto_starts_from_the_reported_size(
    reported: Progress | None, description: str, repair: Repair
) -> None:
    ftjob = running_job(training={"perDeviceTrainBatchSize": "auto", "globalBatchSize": 32})
    assert ftjob.status.batch is None
    last_message = termination_message(
        error_type="CudaOutOfMemory", message="ran out of GPU memory", rank=2, node_rank=1, progress=reported
    )
    ftjob, _ = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, **VICTIM), ended_pod(ftjob, 1, message=last_message))
    )
    ftjob, _ = decide_once(ftjob, observation_of(ftjob))  # the pods are gone

    assert ftjob.status.attempts[0].message.endswith(f"retried with {description}")
    assert ftjob.status.repair == repair


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
def test_an_out_of_memory_failure_without_a_repair_fails_the_job_with_advice(
    fields: dict[str, Any], advice: str
) -> None:
    ftjob = running_job(**fields)
    message = termination_message(error_type="OutOfMemoryError", message="CUDA out of memory. Tried ...", rank=0)
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, ended_pod(ftjob, 0, message=message)))
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, ended_pod(ftjob, 0, message=message)))

    assert ftjob.status.phase is Phase.FAILED
    assert ftjob.status.attempts[-1].message.endswith(advice)
    assert ftjob.status.repair is None
