"""Tests of jobs in a queue of Kueue on a real cluster."""

import pytest
import yaml

from testing.processes.operator_stack import (
    OPERATOR_NAMESPACE,
    REPOSITORY,
    OperatorInstallation,
    build_example_job,
    get_reported_step,
    has_condition,
)
from testing.processes.queues import WORKLOADS, Queues, wait_until_running
from testing.processes.waiting import wait_until

pytestmark = pytest.mark.cluster


def is_running(deployment: OperatorInstallation, job: str) -> bool:
    return has_condition(deployment.get_job(job), "Running")


def wait_for_queue_reason(deployment: OperatorInstallation, job: str, message: str = "must become free") -> None:
    """Wait until Kueue's explanation, which contains the message, is in the status."""
    body = deployment.wait_until(
        job,
        lambda body: message in body.get("status", {}).get("waiting", {}).get("message", ""),
        description=f"waiting: {message}",
        timeout_seconds=90,
    )
    assert body["status"]["waiting"]["reason"] == "WaitingInQueue"


def test_second_job_waits_for_the_first_and_then_runs(deployment: OperatorInstallation, queues: Queues) -> None:
    first = queues.submit("a")
    wait_until_running(deployment, first)
    second = queues.submit("b", program="true")

    message = f"number 1 in LocalQueue {queues.name}: 1 more cpu must become free in flavor {queues.name}"
    wait_for_queue_reason(deployment, second, message)
    third = queues.submit("c", program="true")
    jobs_by_position: dict[int | None, str] = {}

    def have_positions() -> bool:
        """Return whether both jobs have one; Kueue orders Workloads of the same second by their uids."""
        jobs_by_position.clear()
        for job in (second, third):
            jobs_by_position[deployment.get_job(job)["status"].get("scheduling", {}).get("position")] = job
        return {jobs_by_position.get(1), jobs_by_position.get(2)} == {second, third}

    wait_until(have_positions, goal="the waiting jobs are first and second in the queue", timeout_seconds=90)
    status = deployment.get_job(jobs_by_position[2])["status"]
    assert status["scheduling"]["provider"] == "Kueue"
    assert status["display"]["queue"] == f"{queues.name} #2"
    assert f"{queues.name} #2" in deployment.kubectl("get", "ftj", jobs_by_position[2], "-o", "wide")
    deployment.delete(first)
    assert has_condition(deployment.wait_until_finished(second, timeout_seconds=90), "Complete")


def test_completed_job_returns_its_quota_and_keeps_its_pods(deployment: OperatorInstallation, queues: Queues) -> None:
    job = queues.submit("a", program="echo finished")
    assert has_condition(deployment.wait_until_finished(job, timeout_seconds=90), "Complete")

    wait_until(lambda: queues.get_reserved_cpu() == 0, goal="the quota is returned")
    assert len(deployment.list_pods(job)) == 2
    assert "finished" in deployment.kubectl("logs", f"{job}-0-0")


def test_failed_job_returns_its_quota(deployment: OperatorInstallation, queues: Queues) -> None:
    job = queues.submit("a", program="exit 3", restartPolicy={"maxRestarts": 0})
    assert has_condition(deployment.wait_until_finished(job, timeout_seconds=90), "Failed")

    wait_until(lambda: queues.get_reserved_cpu() == 0, goal="the quota is returned")
    wait_until(lambda: not deployment.list_pods(job), goal="Kueue deletes the pods with the Workload")


def test_suspended_job_returns_its_quota_and_is_queued_again(deployment: OperatorInstallation, queues: Queues) -> None:
    first = queues.submit("a")
    wait_until_running(deployment, first)
    second = queues.submit("b")
    wait_for_queue_reason(deployment, second)

    deployment.kubectl("patch", "ftj", first, "--type=merge", "-p", '{"spec":{"suspend":true}}')

    wait_until_running(deployment, second)
    wait_until(lambda: not deployment.list_pods(first), goal="the pods of the suspended job are gone")
    deployment.kubectl("patch", "ftj", first, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    wait_for_queue_reason(deployment, first)
    deployment.delete(second)
    wait_until_running(deployment, first)


def test_restart_keeps_the_quota_while_another_job_waits(deployment: OperatorInstallation, queues: Queues) -> None:
    first = queues.submit("a")
    wait_until_running(deployment, first)
    second = queues.submit("b")
    wait_for_queue_reason(deployment, second)

    deployment.kubectl("delete", "pod", f"{first}-0-1", "--wait=false")

    wait_until_running(deployment, first, attempt=1, timeout_seconds=90)
    assert deployment.get_job(first)["status"]["attempt"] == 1
    assert not is_running(deployment, second)


def test_preempted_job_names_the_preemptor_and_runs_again(deployment: OperatorInstallation, queues: Queues) -> None:
    first = queues.submit("a", priority="low")
    wait_until_running(deployment, first)

    second = queues.submit("b", priority="high")

    wait_until_running(deployment, second)
    deployment.wait_until(first, lambda body: body["status"]["attempt"] == 1, description="preempted")
    record = deployment.get_job(first)["status"]["attempts"][0]
    assert record["reason"] == "Preempted"
    assert "in favour of" in record["message"]
    deployment.delete(second)
    wait_until_running(deployment, first)


def test_deleted_job_leaves_nothing(deployment: OperatorInstallation, queues: Queues) -> None:
    running = queues.submit("a")
    wait_until_running(deployment, running)
    queued = queues.submit("b")
    wait_for_queue_reason(deployment, queued)

    for job in (queued, running):
        deployment.delete(job)

    wait_until(lambda: not queues.list_workloads(), goal="the Workloads are deleted")
    for job in (running, queued):
        wait_until(lambda job=job: not deployment.list_pods(job), goal=f"the pods of {job} are gone")  # type: ignore[misc]
    wait_until(lambda: queues.get_reserved_cpu() == 0, goal="the quota is returned")


def test_job_with_raised_memory_is_queued_again(deployment: OperatorInstallation, queues: Queues) -> None:
    """Kueue accepts only pods with equal requests in a group, so that a repair leaves the group."""
    program = "python3 -c 'import time; data = bytearray(150 << 20); time.sleep(600)'"
    resources = {"requests": {"cpu": "500m"}, "limits": {"memory": "128Mi"}}

    job = queues.submit("a", program=program, resources=resources, restartPolicy={"maxMemory": "512Mi"})

    wait_until_running(deployment, job, attempt=1, timeout_seconds=120)
    assert deployment.get_job(job)["status"]["attempts"][0]["action"] == "Repair"


@pytest.mark.long("takes minutes; another test has one preemption, and a simulated history twenty")
def test_job_survives_twenty_preemptions(deployment: OperatorInstallation, queues: Queues) -> None:
    """Each job of higher priority runs while the first one waits; the first one uses no restart."""
    victim = queues.submit("a", priority="low")
    for number in range(20):
        wait_until_running(deployment, victim)
        preemptor = queues.submit(f"b{number}", program="true", priority="high")
        assert has_condition(deployment.wait_until_finished(preemptor, timeout_seconds=90), "Complete")
        deployment.delete(preemptor)

    wait_until_running(deployment, victim)
    status = deployment.get_job(victim)["status"]
    assert status["attempt"] == 20
    assert status["restarts"] == 20
    assert "withoutProgress" not in status
    assert {record["reason"] for record in status["attempts"][:-1]} == {"Preempted"}


def kill_operator(deployment: OperatorInstallation) -> None:
    deployment.kubectl(
        *("delete", "pod", "--namespace", OPERATOR_NAMESPACE, "-l", "app.kubernetes.io/name=finetune-operator"),
        *("--grace-period=0", "--force", "--wait=false"),
    )


@pytest.mark.long("resembles the test of e2e; the simulation kills operators of queued jobs")
@pytest.mark.alone
def test_operator_is_killed_in_every_phase(deployment: OperatorInstallation, queues: Queues) -> None:
    """The first job keeps its quota over a restart and returns it at the end; both jobs run."""
    first = queues.submit("a")
    kill_operator(deployment)  # before the pods are created
    wait_until_running(deployment, first)
    second = queues.submit("b", program="true")
    kill_operator(deployment)  # while one job runs and the other waits
    wait_for_queue_reason(deployment, second)
    deployment.kubectl("delete", "pod", f"{first}-0-1", "--wait=false")
    kill_operator(deployment)  # while the first job restarts in its group
    wait_until_running(deployment, first, attempt=1, timeout_seconds=120)
    assert deployment.get_job(first)["status"]["attempt"] == 1
    deployment.kubectl("patch", "ftj", first, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    kill_operator(deployment)  # while the first job is being suspended
    assert has_condition(deployment.wait_until_finished(second, timeout_seconds=120), "Complete")
    deployment.kubectl("patch", "ftj", first, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    kill_operator(deployment)  # while the first job is queued again
    wait_until_running(deployment, first)
    kill_operator(deployment)  # while the jobs are being deleted
    deployment.delete(first)
    deployment.delete(second)
    wait_until(lambda: not queues.list_workloads(), goal="the Workloads are deleted", timeout_seconds=120)
    wait_until(lambda: queues.get_reserved_cpu() == 0, goal="the quota is returned")


def test_deactivated_workload_is_a_wait(deployment: OperatorInstallation, queues: Queues) -> None:
    """An administrator stops a running job by its Workload, and starts it again."""
    job = queues.submit("a")
    wait_until_running(deployment, job)
    (workload,) = (workload["metadata"]["name"] for workload in queues.list_workloads())

    deployment.kubectl("patch", WORKLOADS, workload, "--type=merge", "-p", '{"spec":{"active":false}}')

    deployment.wait_until(
        job,
        lambda body: "is deactivated" in body.get("status", {}).get("waiting", {}).get("message", ""),
        description="waiting for its activation",
        timeout_seconds=90,
    )
    deployment.kubectl("patch", WORKLOADS, workload, "--type=merge", "-p", '{"spec":{"active":true}}')
    wait_until_running(deployment, job)
    assert "withoutProgress" not in deployment.get_job(job)["status"]


def test_example_job_is_admitted_by_the_example_queue(deployment: OperatorInstallation) -> None:
    """Kueue admits the job; then no Kubernetes node has its GPUs."""
    manifests, namespace = REPOSITORY / "manifests", f"namespace: {deployment.namespace}"
    queue = (manifests / "kueue" / "queue.yaml").read_text().replace("namespace: default", namespace)
    deployment.apply(*yaml.safe_load_all(queue))
    deployment.apply(yaml.safe_load((manifests / "examples" / "kueue.yaml").read_text()))
    try:
        body = deployment.wait_until(
            "kueue",
            lambda body: body.get("status", {}).get("waiting", {}).get("reason") == "Unschedulable",
            description="admitted",
            timeout_seconds=60,
        )
        assert body["status"]["scheduling"]["queueName"] == body["status"]["display"]["queue"] == "gpus"
    finally:
        deployment.delete("kueue")
        deployment.kubectl("delete", "-f", "-", stdin=queue)


@pytest.mark.long("takes two minutes; other tests have a preemption, and a training that is stopped and resumed")
def test_preempted_training_resumes_from_its_checkpoint(deployment: OperatorInstallation, queues: Queues) -> None:
    """The ranks save a checkpoint within the grace period, and lose no step."""
    job = f"{queues.name}-training"
    training = {**build_example_job(job)["spec"]["training"], "maxSteps": 200, "saveSteps": 1000}
    scheduling = {"queueName": queues.name, "priorityClassName": "low"}
    requests = {"requests": {"cpu": "500m"}}
    deployment.apply(build_example_job(job, training=training, scheduling=scheduling, resources=requests))
    queues.jobs.append(job)
    deployment.wait_until(job, lambda body: get_reported_step(body) >= 5, description="at step 5", timeout_seconds=120)

    preemptor = queues.submit("b", program="true", priority="high")

    assert has_condition(deployment.wait_until_finished(preemptor, timeout_seconds=120), "Complete")
    finished = deployment.wait_until_finished(job)
    assert has_condition(finished, "Complete")
    preempted, resumed = finished["status"]["attempts"]
    assert preempted["reason"] == "Preempted"
    assert resumed["firstStep"] == preempted["lastStep"] > 0
    assert finished["status"]["progress"]["step"] == 200
