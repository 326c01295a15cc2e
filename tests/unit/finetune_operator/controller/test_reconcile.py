"""One pass: what is asked of the cluster, in which order, and what is left for the next."""

import contextlib
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, JobStatus, Progress
from finetune_operator.controller.reconcile import (
    BREATH,
    LONGEST_SLEEP,
    Outcome,
    Pass,
    Seen,
    build_event,
    reconcile,
    render_status,
)
from finetune_operator.core.actions import Emit
from finetune_operator.kube.cluster import ClusterError, Conflict, NameTaken, Refused
from finetune_operator.observation.pods import Refusal
from finetune_operator.plan.manifests import build_service
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import NOW, SETTINGS, UID, Raw, deleting, ended, job, pod, running, seen, spec, step
from testing.fakes.recording_cluster import RecordingCluster

NOTHING = Seen()
LATER = NOW + timedelta(minutes=1)
LIST = f"list pods of default/{UID}"
CLAIMS = ["get PersistentVolumeClaim default/models", "get PersistentVolumeClaim default/datasets"]
CREATES = ["create Service bert", "create ConfigMap bert-0", "create Pod bert-0-0", "create Pod bert-0-1"]


def body(status: JobStatus | None = None, **fields: Any) -> Raw:
    """The job as the API shows it."""
    metadata = {"name": "bert", "namespace": "default", "uid": UID, "generation": 1, "resourceVersion": "7"}
    shown: Raw = {"metadata": metadata, "spec": spec(**fields)}
    return shown if status is None else {**shown, "status": render_status(status)}


def after(*looks: tuple[Raw, ...], **fields: Any) -> JobStatus:
    """The status once a job has been decided on, and then with each of these sets of pods."""
    of = job(**fields)
    for pods in ((), *looks):
        of, _ = step(of, seen(of, *pods))
    return of.status


def running_pods() -> tuple[Raw, ...]:
    return running(job(), 0), running(job(), 1)


def seen_with(*pods: Raw, **fields: Any) -> Seen:
    return Seen(pods=pods, services=(build_service(plan_run(job(), attempt=0, settings=SETTINGS)),), **fields)


async def one_pass(cluster: RecordingCluster, of: Raw, watched: Seen = NOTHING) -> Outcome:
    return await reconcile(Pass(cluster, SETTINGS, lambda: LATER), of, watched)


def creates(cluster: RecordingCluster) -> list[str]:
    return [line for line in cluster.asked if line.startswith("create")]


def told(outcome: Outcome) -> JobStatus:
    return FineTuneJob.parse(outcome.job).status


async def test_the_status_is_written_before_anything_is_done() -> None:
    cluster = RecordingCluster()
    outcome = await one_pass(cluster, body(after()), seen_with(*running_pods()))

    assert cluster.asked == ["write status", "event Running"]
    assert told(outcome).attempts[-1].state is AttemptState.RUNNING
    assert outcome.requeue_after == timedelta()  # the next step needs no event


async def test_a_conflict_ends_the_pass_before_anything_is_done() -> None:
    cluster = RecordingCluster(fails={"write status": Conflict("changed")})
    with pytest.raises(Conflict):
        await one_pass(cluster, body(after()), seen_with(*running_pods()))

    assert cluster.asked == ["write status"]


async def test_a_status_that_is_as_it_was_is_not_written() -> None:
    cluster = RecordingCluster()
    status = after(running_pods())
    outcome = await one_pass(cluster, body(status), seen_with(*running_pods()))

    assert cluster.asked == []
    assert outcome == Outcome(body(status))


async def test_a_pod_that_is_missed_is_looked_for_by_name_and_only_that() -> None:
    hidden = running(job(), 1)
    hidden["metadata"]["labels"] = {}
    cluster = RecordingCluster(pods=(running(job(), 0),), hidden={"bert-0-1": hidden})
    outcome = await one_pass(cluster, body(after(running_pods())), seen_with(running(job(), 0)))

    assert cluster.asked == [LIST, "get Pod default/bert-0-1", "write status"]
    assert told(outcome).attempts[-1].evidence[1].deleted

    cluster.pods = ()
    outcome = await one_pass(cluster, outcome.job, seen_with(gone=(deleting(ended(job(), 0)),)))
    stopped = ["write status", "delete Pod bert-0-1 pod-0-1 within 120 s"]
    assert cluster.asked[3:] == [LIST, "get Pod default/bert-0-1", *stopped]


async def test_a_pod_of_another_owner_with_our_labels_is_none_of_ours() -> None:
    theirs = running(job(), 1)
    theirs["metadata"]["ownerReferences"][0]["uid"] = "another"
    cluster = RecordingCluster(pods=(running(job(), 0), theirs))
    outcome = await one_pass(cluster, body(after(running_pods())), seen_with(running(job(), 0), theirs))

    assert told(outcome).attempts[-1].state is AttemptState.STOPPING


async def test_children_are_made_only_after_one_look_that_no_cache_can_give() -> None:
    cluster = RecordingCluster()
    await one_pass(cluster, body(after()))

    assert sorted(cluster.asked[:3]) == sorted([*CLAIMS, LIST])
    assert cluster.asked[3:] == CREATES


async def test_a_pod_that_only_the_list_shows_is_not_made_again() -> None:
    cluster = RecordingCluster(pods=(pod(job(), 0),))
    await one_pass(cluster, body(after()))

    assert creates(cluster) == [line for line in CREATES if line != "create Pod bert-0-0"]


async def test_what_a_cache_misses_is_not_lost_while_the_list_has_it() -> None:
    cluster = RecordingCluster(pods=running_pods())
    outcome = await one_pass(cluster, body(after(running_pods())), seen_with(running(job(), 0)))

    assert cluster.asked == [LIST]  # claims matter only before an attempt has begun
    assert outcome.requeue_after is None


async def test_a_pod_that_only_a_cache_has_is_remembered_and_not_made_again() -> None:
    cluster = RecordingCluster(pods=())
    outcome = await one_pass(cluster, body(after()), seen_with(pod(job(), 0)))

    assert creates(cluster) == []
    assert told(outcome).attempts[-1].evidence[0].deleted


async def test_claims_are_looked_at_before_pods_are_made() -> None:
    cluster = RecordingCluster(access_modes={"models": ["ReadWriteOnce"]})
    outcome = await one_pass(cluster, body(after()))

    assert told(outcome).attempts[-1].reason == "InvalidSpec"
    assert creates(cluster) == []


async def test_every_action_is_tried_before_an_error_is_raised() -> None:
    cluster = RecordingCluster(fails={line: ClusterError("timeout") for line in CREATES[2:]})
    with pytest.raises(ClusterError, match="timeout"):
        await one_pass(cluster, body(after()))

    assert creates(cluster) == CREATES


@pytest.mark.parametrize("error", [ClusterError("timeout"), NameTaken(kind="ConfigMap", name="bert-0")])
async def test_no_pod_is_made_that_would_mount_what_is_not_ours(error: Exception) -> None:
    cluster = RecordingCluster(fails={CREATES[1]: error})
    with contextlib.suppress(ClusterError):
        await one_pass(cluster, body(after()))

    assert creates(cluster) == CREATES[:2]


async def test_refusals_are_handed_back_and_looked_at_at_once() -> None:
    refused = Refused("exceeded quota", status=403, kind="Pod", name="bert-0-1")
    cluster = RecordingCluster(
        fails={
            CREATES[0]: NameTaken(kind="Service", name="bert"),
            CREATES[2]: NameTaken(kind="Pod", name="bert-0-0", leaving=True),
            CREATES[3]: refused,
        }
    )
    outcome = await one_pass(cluster, body(after()))

    taken, left, quota = outcome.refusals
    assert (taken.kind, taken.name, taken.taken, taken.leaving) == ("Service", "bert", True, False)
    assert (left.kind, left.name, left.taken, left.leaving) == ("Pod", "bert-0-0", False, True)
    assert quota == Refusal("Pod", "bert-0-1", 403, "exceeded quota")
    assert outcome.requeue_after == timedelta()


async def test_a_refusal_that_is_known_is_tried_again_after_a_while() -> None:
    known = (Refusal("Pod", "bert-0-1", 403, "exceeded quota"),)
    refused = Refused("exceeded quota", status=403, kind="Pod", name="bert-0-1")
    cluster = RecordingCluster(fails={CREATES[3]: refused})
    first = await one_pass(cluster, body(after()), Seen(refusals=known))
    second = await one_pass(cluster, first.job, Seen(refusals=known))

    assert first.requeue_after == timedelta()  # what it waits for was written
    assert (second.refusals, second.requeue_after) == (known, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("deadline", "looked"), [(120, timedelta(seconds=60)), (360, LONGEST_SLEEP), (86_400, LONGEST_SLEEP)]
)
async def test_a_clock_that_is_set_right_is_noticed_within_minutes(deadline: int, looked: timedelta) -> None:
    status = after(running_pods(), running_pods(), activeDeadlineSeconds=deadline)
    of = body(status, activeDeadlineSeconds=deadline)
    outcome = await one_pass(RecordingCluster(), of, seen_with(*running_pods()))

    assert outcome.requeue_after == looked


@pytest.mark.parametrize(
    ("since_write", "written"),
    [
        pytest.param(BREATH / 4, False, id="just written"),
        pytest.param(BREATH, True, id="a breath ago"),
        pytest.param(None, True, id="never written by us"),
    ],
)
async def test_a_write_that_only_readers_would_miss_waits(since_write: timedelta | None, written: bool) -> None:
    cluster, of = RecordingCluster(), body(after(running_pods()))
    polled = Progress(step=5, update_time=LATER)
    outcome = await one_pass(cluster, of, seen_with(*running_pods(), progress=polled, since_write=since_write))

    assert (cluster.asked == ["write status"]) is written
    if not written:
        assert outcome == Outcome(of, BREATH * 3 / 4)


async def test_a_write_that_decides_something_never_waits() -> None:
    cluster = RecordingCluster()
    await one_pass(cluster, body(after()), seen_with(*running_pods(), since_write=timedelta()))

    assert cluster.asked[0] == "write status"


async def test_progress_of_an_older_attempt_is_not_that_of_the_present() -> None:
    cluster = RecordingCluster()
    stale = Progress(step=5, update_time=NOW - timedelta(seconds=1))
    await one_pass(cluster, body(after(running_pods())), seen_with(*running_pods(), progress=stale))

    assert cluster.asked == []


async def test_a_service_of_somebody_else_is_not_the_jobs() -> None:
    foreign = {"metadata": {"name": "bert", "ownerReferences": [{"uid": "another", "controller": True}]}}
    cluster = RecordingCluster(pods=running_pods())
    await one_pass(cluster, body(after()), Seen(pods=running_pods(), services=(foreign,)))

    assert "create Service bert" in cluster.asked


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"selector": {"app": "theirs"}}, id="it selects others"),
        pytest.param({"publishNotReadyAddresses": False}, id="names come too late"),
        pytest.param({"type": "ExternalName", "externalName": "example.com", "clusterIP": ""}, id="another type"),
    ],
)
async def test_a_service_that_was_edited_is_deleted_and_no_other(edit: Raw) -> None:
    service = build_service(plan_run(job(), attempt=0, settings=SETTINGS))
    metadata = {**service["metadata"], "uid": "uid-9"}
    made_so = {"metadata": metadata, "spec": {**service["spec"], "type": "ClusterIP", "sessionAffinity": "None"}}
    edited = {"metadata": metadata, "spec": {**service["spec"], **edit}}
    of = body(after(running_pods()))
    for there, asked in ((made_so, []), (edited, ["delete Service bert uid-9"])):
        cluster = RecordingCluster(pods=running_pods())
        await one_pass(cluster, of, Seen(pods=running_pods(), services=(there,)))
        assert cluster.asked == asked


async def test_a_spec_that_cannot_be_read_fails_once_and_in_words() -> None:
    cluster = RecordingCluster()
    first = await one_pass(cluster, body(numNodes=0))
    second = await one_pass(cluster, first.job)

    [status] = cluster.statuses
    assert status["phase"] == "Failed"
    [failed] = [condition for condition in status["conditions"] if condition["type"] == "Failed"]
    assert failed["reason"] == "InvalidSpec"
    assert failed["message"] == "spec.numNodes: must be greater than or equal to 1, found 0"
    assert second == Outcome(first.job)
    assert cluster.asked == ["write status", "event InvalidSpec"]


async def test_a_spec_that_can_no_longer_be_read_leaves_nothing_running() -> None:
    cluster = RecordingCluster()
    broken = body(after(running_pods()), numNodes=0)
    first = await one_pass(cluster, broken, seen_with(*running_pods()))
    stops = ["delete Pod bert-0-0 pod-0-0 within 10 s", "delete Pod bert-0-1 pod-0-1 within 10 s"]

    assert cluster.asked == ["write status", *stops, "event InvalidSpec"]
    assert first.job["status"]["attempts"][-1]["state"] == "Failed"

    again = RecordingCluster()  # the stopping was lost with the operator that asked for it
    await one_pass(again, first.job, seen_with(*running_pods()))
    assert again.asked == stops


async def test_a_status_that_cannot_be_read_is_left_to_who_can() -> None:
    cluster = RecordingCluster()
    with pytest.raises(ClusterError, match=r"status cannot be read, the job is left alone: status.phase: "):
        await one_pass(cluster, {**body(), "status": {"phase": "Evaluating"}}, seen_with(*running_pods()))

    assert cluster.asked == []


async def test_pods_are_stopped_by_uid_and_within_their_time() -> None:
    status = after(running_pods(), (running(job(), 0), ended(job(), 1)))
    assert status.attempts[-1].state is AttemptState.STOPPING
    cluster = RecordingCluster()
    await one_pass(cluster, body(status), seen_with(running(job(), 0), ended(job(), 1)))

    assert cluster.asked == ["delete Pod bert-0-0 pod-0-0 within 10 s"]


async def test_a_job_is_deleted_by_uid_when_its_time_is_over() -> None:
    status = after().model_copy(update={"completion_time": NOW})
    cluster = RecordingCluster()
    await one_pass(cluster, body(status, ttlSecondsAfterFinished=60))

    assert cluster.asked == [f"delete FineTuneJob bert {UID}"]


async def test_a_new_attempt_removes_the_config_of_the_last() -> None:
    [record] = after().attempts
    status = after().model_copy(update={"attempt": 1, "attempts": (record.model_copy(update={"attempt": 1}),)})
    cluster = RecordingCluster()
    await one_pass(cluster, body(status), seen_with())

    assert "delete ConfigMap bert-0" in cluster.asked


def test_an_event_that_is_told_again_has_the_same_name() -> None:
    emit = Emit("Warning", "RankKilled", "rank 3 was ended by SIGKILL", "failed-0")
    event = build_event(job().metadata, emit, NOW)
    again = build_event(job().metadata, Emit("Warning", "RankKilled", "other words", "failed-0"), LATER)
    other = build_event(job().metadata, Emit("Warning", "RankKilled", "rank 3 was ended by SIGKILL", "failed-1"), NOW)

    assert event["metadata"]["name"] == again["metadata"]["name"] != other["metadata"]["name"]
    assert (event["involvedObject"]["kind"], event["involvedObject"]["uid"]) == ("FineTuneJob", UID)
    assert (event["type"], event["reason"], event["firstTimestamp"]) == (
        "Warning",
        "RankKilled",
        "2026-01-01T12:00:00Z",
    )


def test_an_event_is_not_longer_than_the_api_server_takes() -> None:
    event = build_event(job().metadata, Emit("Normal", "Running", "x" * 5000, "running-0"), NOW)
    assert len(event["message"]) == 1024


def test_a_status_is_written_without_what_is_empty_but_with_its_restarts() -> None:
    assert render_status(JobStatus()) == {"restarts": 0}


def test_a_status_that_was_written_is_read_as_it_was() -> None:
    status = after(running_pods())
    assert FineTuneJob.parse(body(status)).status == status
