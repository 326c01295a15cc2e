"""How an attempt ends: the siblings are stopped, all the evidence is gathered, one write says what follows."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.termination import Outcome, Termination
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, Fault, JobStatus, Phase, Progress, Repair
from finetune_operator import names
from finetune_operator.core.actions import Create, DeletePod
from finetune_operator.core.stop_attempt import ABORT_GRACE_SECONDS, LAST_WORDS_WITHIN
from finetune_operator.plan.manifests import GRACE_SECONDS
from testing.builders.jobs import NOW, Raw, command, deleting, ended, job, pod, running, seen, step

KILLED: Raw = {"exit_code": 137, "finishedAt": "2026-01-01T12:00:00Z"}
LATER = NOW + timedelta(seconds=2)


def words(**fields: Any) -> str:
    """What a supervisor leaves behind."""
    message = Termination(**{"final": True, "outcome": Outcome.FAILED, "time": NOW.timestamp() + 0.4, **fields})
    return message.model_dump_json(by_alias=True)


VICTIM: Raw = {"message": words(error_type="DistBackendError", message="Connection closed by peer")}


def disrupted(body: Raw, reason: str) -> Raw:
    """The same pod with a DisruptionTarget condition."""
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
    return {**body, "status": {**body["status"], "conditions": conditions}}


def restarted(of: FineTuneJob, node_rank: int, **terminated: Any) -> Raw:
    """A pod whose kubelet started the container once more."""
    [status] = ended(of, node_rank, **terminated)["status"]["containerStatuses"]
    body = running(of, node_rank)
    body["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": status["state"]}
    return body


def started(**fields: Any) -> FineTuneJob:
    """A job whose first attempt runs."""
    of = job(**fields)
    of, _ = step(of, seen(of))
    of, _ = step(of, seen(of, *(running(of, rank) for rank in range(of.spec.num_nodes))))
    assert of.status.attempts[-1].state is AttemptState.RUNNING
    return of


def test_a_cause_that_is_seen_after_its_victim_is_still_the_cause() -> None:
    of = started()
    of, _ = step(of, seen(of, ended(of, 0, **VICTIM), running(of, 1)), now=LATER)
    of, _ = step(of, seen(of, ended(of, 0, **VICTIM), deleting(ended(of, 1, **KILLED))), now=LATER)

    assert (of.status.attempts[0].reason, of.status.attempts[0].node_rank) == ("ContainerKilled", 1)


def test_a_pod_that_only_its_name_finds_is_stopped_with_the_others_and_waited_for() -> None:
    of = started()
    hidden = running(of, 1)
    del hidden["metadata"]["labels"][names.JOB_UID]
    unsure = step(of, seen(of, running(of, 0), fresh=False), now=LATER)[1]
    of, _ = step(of, seen(of, running(of, 0), hidden), now=LATER)
    both = step(of, seen(of, running(of, 0), hidden), now=LATER)[1]
    of, waiting = step(of, seen(of, deleting(hidden), gone=(deleting(running(of, 0)),)), now=LATER)
    still_there = of.status.attempts[-1].state
    of, _ = step(of, seen(of), now=LATER)

    assert unsure.unsure
    assert [action.name for action in both.actions if isinstance(action, DeletePod)] == ["bert-0-0", "bert-0-1"]
    assert (still_there, waiting.requeue_after is not None) == (AttemptState.STOPPING, True)
    assert (of.status.attempts[0].reason, of.status.attempts[0].node_rank) == ("PodDeleted", 1)
    assert "pod bert-0-1 lost its labels" in of.status.attempts[0].message


STOPPED: Raw = {"message": words(outcome=Outcome.STOPPED), "finishedAt": "2026-01-01T12:00:00Z"}


@pytest.mark.parametrize("late", [False, True], ids=["seen first", "seen after its victim"])
def test_a_container_that_was_restarted_in_place_is_the_cause_and_is_stopped(late: bool) -> None:
    of = started()
    again = restarted(of, 1, exit_code=143, **STOPPED)
    other = ended(of, 0, **VICTIM)
    looks = [(other, running(of, 1))] if late else [(running(of, 0), again)]
    for pods in (*looks, (other, again)):
        of, decision = step(of, seen(of, *pods), now=LATER)
    of, decision = step(of, seen(of, other, again), now=NOW + timedelta(seconds=10))
    assert [action.name for action in decision.actions if isinstance(action, DeletePod)] == ["bert-0-1"]

    broken = ended(of, 1, exit_code=128, reason="StartError", message='exec: "python3": not found')
    of, _ = step(of, seen(of, other, broken), now=LATER)
    first = of.status.attempts[0]
    assert (first.reason, first.node_rank, first.fault) == ("PodDeleted", 1, Fault.INFRASTRUCTURE)
    assert "pod bert-0-1 was restarted in place" in first.message


def test_a_node_that_dies_of_our_stopping_it_is_not_the_cause() -> None:
    late: Raw = {"exit_code": 137, "finishedAt": "2026-01-01T12:00:12Z"}
    of = started()
    of, _ = step(of, seen(of, ended(of, 0, **VICTIM), running(of, 1)), now=LATER)
    stopped = deleting(ended(of, 1, **late), deadline=NOW + timedelta(seconds=12))
    of, _ = step(of, seen(of, ended(of, 0, **VICTIM), stopped), now=LATER)

    assert of.status.attempts[0].reason == "PeerLost"


def test_a_pod_that_somebody_deletes_is_the_cause_though_its_ranks_complain_of_their_peers() -> None:
    of = started()
    of, _ = step(of, seen(of, deleting(running(of, 0)), running(of, 1)))
    of, _ = step(of, seen(of, deleting(ended(of, 0, **VICTIM)), deleting(ended(of, 1, **VICTIM))), now=LATER)

    assert (of.status.attempts[0].reason, of.status.attempts[0].node_rank) == ("PodDeleted", 0)


def test_a_machine_without_power_is_the_cause_though_its_pod_never_says_anything() -> None:
    of = started()
    of, _ = step(of, seen(of, ended(of, 0, **VICTIM), running(of, 1)), now=LATER)
    lost = disrupted(deleting(running(of, 1), deadline=LATER), "DeletionByTaintManager")
    of, _ = step(of, seen(of, ended(of, 0, **VICTIM), lost), now=LATER + timedelta(seconds=60))

    assert (of.status.attempts[0].reason, of.status.attempts[0].fault) == ("NodeLost", Fault.INFRASTRUCTURE)


def test_an_eviction_of_a_pod_that_we_stop_already_explains_nothing() -> None:
    of = started()
    of, _ = step(of, seen(of, ended(of, 0, **VICTIM), running(of, 1)), now=LATER)
    late: Raw = {"exit_code": 143, "message": words(outcome=Outcome.STOPPED)}
    evicted = disrupted(deleting(ended(of, 1, **late)), "EvictionByEvictionAPI")
    of, _ = step(of, seen(of, ended(of, 0, **VICTIM), evicted), now=LATER)

    assert of.status.attempts[0].reason == "PeerLost"


def test_evidence_survives_its_pod() -> None:
    of = started()
    of, _ = step(of, seen(of, ended(of, 0, **KILLED), running(of, 1)), now=LATER)
    of, _ = step(of, seen(of), now=LATER)

    assert of.status.attempts[0].reason == "ContainerKilled"


def test_a_missing_pod_is_evidence_by_itself() -> None:
    of = started()
    of, _ = step(of, seen(of, running(of, 0)))
    of, _ = step(of, seen(of))

    assert (of.status.attempts[0].reason, of.status.attempts[0].node_rank) == ("PodDeleted", 1)


def test_success_on_every_node_wins_over_whatever_began_the_stop() -> None:
    done: Raw = {"exit_code": 0, "message": words(outcome=Outcome.SUCCEEDED)}
    of = started()
    of, _ = step(of, seen(of, running(of, 0), deleting(running(of, 1))))
    of, _ = step(of, seen(of, ended(of, 0, **done), deleting(ended(of, 1, **done))), now=LATER)

    assert of.status.attempts[0].state is AttemptState.SUCCEEDED
    assert of.status.completion_time == LATER


@pytest.mark.parametrize(
    ("first", "grace_seconds"),
    [
        pytest.param(lambda of: deleting(running(of, 1)), GRACE_SECONDS, id="a drain leaves time to save"),
        pytest.param(lambda of: ended(of, 1, **KILLED), ABORT_GRACE_SECONDS, id="ranks of a failed job are blocked"),
    ],
)
def test_siblings_get_as_long_as_they_can_use(first: Any, grace_seconds: int) -> None:
    of = started()
    pods = (running(of, 0), first(of))
    of, _ = step(of, seen(of, *pods))
    _, decision = step(of, seen(of, *pods))

    assert [a.grace_seconds for a in decision.actions if isinstance(a, DeletePod)] == [grace_seconds]


def test_a_victim_that_is_seen_first_leaves_its_culprit_time_to_say_what_happened() -> None:
    """One that is asked to stop before it has told its end is told as stopped, and its peer takes the blame."""
    of = started()
    pods = (ended(of, 0, **VICTIM), running(of, 1))
    of, _ = step(of, seen(of, *pods))
    of, at_first = step(of, seen(of, *pods), now=LATER)
    _, in_vain = step(of, seen(of, *pods), now=LATER + LAST_WORDS_WITHIN)
    of, _ = step(of, seen(of, pods[0], ended(of, 1, message=words(error_type="ValueError"))), now=LATER)

    assert at_first.actions == ()
    assert at_first.requeue_after == timedelta(seconds=1.4)  # the victim ended at 0.4 s
    assert in_vain.actions == (DeletePod("bert-0-1", "pod-0-1", ABORT_GRACE_SECONDS),)
    assert (of.status.attempts[0].reason, of.status.attempts[0].node_rank) == ("UserCodeError", 1)


def test_a_failure_during_a_drain_hurries_the_siblings() -> None:
    of = started()
    pods = (deleting(running(of, 0), deadline=NOW + timedelta(seconds=GRACE_SECONDS)), deleting(running(of, 1)))
    of, _ = step(of, seen(of, *pods))
    _, decision = step(of, seen(of, pods[0], ended(of, 1, **VICTIM)))

    assert decision.actions == (DeletePod("bert-0-0", "pod-0-0", ABORT_GRACE_SECONDS),)


def test_a_lost_machine_is_waited_for_until_it_is_fenced_and_no_longer() -> None:
    of = started()
    lost = disrupted(deleting(running(of, 1), deadline=NOW), "DeletionByTaintManager")
    of, _ = step(of, seen(of, ended(of, 0, **KILLED), lost))
    waiting, _ = step(of, seen(of, ended(of, 0, **KILLED), lost), now=NOW + timedelta(seconds=29))
    moved_on, _ = step(of, seen(of, ended(of, 0, **KILLED), lost), now=NOW + timedelta(seconds=30))

    assert (waiting.status.attempt, moved_on.status.attempt) == (0, 1)


def test_a_machine_whose_clock_is_wrong_delays_nobody() -> None:
    ahead = ended(of := started(), 0, message=words(error_type="DistBackendError", time=NOW.timestamp() + 3600))
    of, _ = step(of, seen(of, ahead, running(of, 1)))
    _, decision = step(of, seen(of, ahead, running(of, 1)))

    assert decision.actions == (DeletePod("bert-0-1", "pod-0-1", ABORT_GRACE_SECONDS),)


def test_a_lost_machine_is_given_no_time_to_save_but_its_peers_are() -> None:
    """Kubernetes gave both the pods' own grace; nobody on the lost one obeys, and all wait until it is fenced."""
    of = started()
    lost = disrupted(
        deleting(running(of, 1), deadline=NOW + timedelta(seconds=GRACE_SECONDS)), "DeletionByTaintManager"
    )
    of, _ = step(of, seen(of, running(of, 0), lost))
    _, decision = step(of, seen(of, running(of, 0), lost))

    assert decision.actions == (
        DeletePod("bert-0-0", "pod-0-0", GRACE_SECONDS),
        DeletePod("bert-0-1", "pod-0-1", ABORT_GRACE_SECONDS),
    )


def test_the_verdict_and_the_next_attempt_are_one_write() -> None:
    of = started()
    of, _ = step(of, seen(of, ended(of, 0, **KILLED), ended(of, 1, **VICTIM)))
    before: JobStatus = of.status
    of, decision = step(of, seen(of, ended(of, 0, **KILLED), ended(of, 1, **VICTIM)))

    assert (before.attempt, before.attempts[-1].state) == (0, AttemptState.STOPPING)
    assert [(r.attempt, r.state) for r in of.status.attempts] == [
        (0, AttemptState.FAILED),
        (1, AttemptState.STARTING),
    ]
    assert (of.status.attempt, of.status.restarts) == (1, 1)
    assert {type(action).__name__ for action in decision.actions} == {"Emit"}


def test_a_deadline_while_pods_stop_is_no_alarm() -> None:
    of = started(activeDeadlineSeconds=60)
    late = NOW + timedelta(seconds=61)
    of, _ = step(of, seen(of, running(of, 0), running(of, 1)), now=late)
    _, decision = step(of, seen(of, running(of, 0), running(of, 1)), now=late)

    assert of.status.attempts[-1].reason == "DeadlineExceeded"
    assert decision.requeue_after is not None
    assert decision.requeue_after > timedelta(seconds=1)


def test_a_pod_that_vanished_before_its_attempt_was_noted_as_created_ends_the_attempt() -> None:
    of = job()
    of, _ = step(of, seen(of))
    of, _ = step(of, seen(of, pod(of, 0), gone=(pod(of, 1),)))

    assert of.status.attempts[-1].state is AttemptState.STOPPING


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param(None, "the command ended with exit 0 on every node", id="without an output"),
        pytest.param(
            {"persistentVolumeClaim": {"claimName": "models"}},
            "the command ended with exit 0 on every node; what it wrote to FINETUNE_OUTPUT is in models:default/bert",
            id="with an output",
        ),
    ],
)
def test_a_command_is_complete_when_every_node_ended_well(output: Any, message: str) -> None:
    of = started(**command({"script": "train.py"}, output=output))
    done: Raw = {"exit_code": 0, "message": words(outcome=Outcome.SUCCEEDED)}
    of, _ = step(of, seen(of, ended(of, 0, **done), ended(of, 1, **done)))

    assert (of.status.phase, of.status.attempts[-1].message) == (Phase.COMPLETE, message)
    assert of.status.batch is None
    assert of.status.output == ("models:default/bert" if output else None)


def test_a_job_that_ran_out_of_gpu_memory_goes_on_with_smaller_micro_batches() -> None:
    of = started(training={"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 2})
    said = words(error_type="CudaOutOfMemory", message="ran out of GPU memory at step 37 with ...", rank=1)
    of, _ = step(of, seen(of, ended(of, 0, message=said), ended(of, 1, **VICTIM)))
    of, _ = step(of, seen(of, ended(of, 0, message=said), ended(of, 1, **VICTIM)))

    old, new = of.status.attempts
    assert (old.reason, old.fault, old.action) == ("CudaOutOfMemory", Fault.RESOURCE, "Repair")
    assert old.message == (
        "node 0 (gpu-0) rank 1 ran out of GPU memory at step 37 with ...; retried with perDeviceTrainBatchSize 4 -> 2,"
        " gradientAccumulationSteps 2 -> 4 (effective batch stays 32)"
    )
    assert (new.attempt, new.not_before) == (1, None)
    assert of.status.repair == Repair(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert of.status.batch is not None
    assert (of.status.batch.per_device_train_batch_size, of.status.batch.effective) == (2, 32)
    (config,) = (a.manifest for a in step(of, seen(of))[1].actions if isinstance(a, Create) and "data" in a.manifest)
    training = json.loads(config["data"]["job.json"])["training"]
    assert training == {"perDeviceTrainBatchSize": 2, "gradientAccumulationSteps": 4}


def test_nodes_that_ran_out_of_host_memory_get_more_of_it_and_then_the_job_ends_with_numbers() -> None:
    limits = {"limits": {"cpu": 4, "memory": "2Gi"}}
    of = started(numNodes=1, resources=limits, restartPolicy={"maxMemory": "3Gi"}, **command({"script": "train.py"}))
    killed = ended(of, 0, reason="OOMKilled", exit_code=137)
    of, _ = step(of, seen(of, killed))
    of, _ = step(of, seen(of, killed))

    old = of.status.attempts[0]
    assert (old.reason, old.action) == ("HostOutOfMemory", "Repair")
    assert old.message.endswith("host memory at step 0; retried with resources.limits.memory 2Gi -> 3Gi")
    (pod,) = (
        a.manifest for a in step(of, seen(of))[1].actions if isinstance(a, Create) and a.manifest["kind"] == "Pod"
    )
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"cpu": 4, "memory": "3Gi"}}
    assert {"medium": "Memory", "sizeLimit": str(3 * 2**29)} in [v.get("emptyDir") for v in pod["spec"]["volumes"]]

    killed = ended(of, 0, attempt=1, reason="OOMKilled", exit_code=137)
    of, _ = step(of, seen(of, killed))
    of, _ = step(of, seen(of, killed))
    assert of.status.phase is Phase.FAILED
    assert "the limit was 3Gi: raise resources.limits.memory, or start fewer" in of.status.attempts[-1].message


@pytest.mark.parametrize(
    ("reported", "said", "repair"),
    [
        pytest.param(
            Progress(step=36, per_device_train_batch_size=4),
            "perDeviceTrainBatchSize 4 -> 2, gradientAccumulationSteps 2 -> 4 (effective batch stays 32)",
            Repair(per_device_train_batch_size=2, gradient_accumulation_steps=4),
            id="what was trained is halved",
        ),
        pytest.param(
            None, "gradientCheckpointing: true", Repair(gradient_checkpointing=True), id="nothing was chosen yet"
        ),
    ],
)
def test_a_size_that_auto_chose_is_repaired_from_what_the_trainer_said(
    reported: Progress | None, said: str, repair: Repair
) -> None:
    of = started(training={"perDeviceTrainBatchSize": "auto", "globalBatchSize": 32})
    assert of.status.batch is None
    last = words(error_type="CudaOutOfMemory", message="ran out of GPU memory", rank=2, node_rank=1, progress=reported)
    of, _ = step(of, seen(of, ended(of, 0, **VICTIM), ended(of, 1, message=last)))
    of, _ = step(of, seen(of))  # the pods are gone

    assert of.status.attempts[0].message.endswith(f"retried with {said}")
    assert of.status.repair == repair


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
            id="nothing is left to change",
        ),
        pytest.param(
            {"restartPolicy": {"maxRestarts": 0}, "numNodes": 1},
            "use smaller batches, or larger or more GPUs",
            id="no restarts are wanted",
        ),
        pytest.param(
            command({"script": "train.py"}) | {"numNodes": 1},
            "use smaller batches, or larger or more GPUs",
            id="command",
        ),
    ],
)
def test_memory_that_nothing_can_help_ends_the_job_with_advice(fields: dict[str, Any], advice: str) -> None:
    of = started(**fields)
    said = words(error_type="OutOfMemoryError", message="CUDA out of memory. Tried ...", rank=0)
    of, _ = step(of, seen(of, ended(of, 0, message=said)))
    of, _ = step(of, seen(of, ended(of, 0, message=said)))

    assert of.status.phase is Phase.FAILED
    assert of.status.attempts[-1].message.endswith(advice)
    assert of.status.repair is None
