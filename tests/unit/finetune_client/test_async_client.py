"""Tests of the client with an in-memory API server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Condition, JobStatus, Phase, Progress
from finetune_client.async_client import AsyncClient, WaitTarget
from finetune_client.client import Client
from finetune_client.errors import ClientError, JobFailed, WaitTimeout
from finetune_client.job_logs import LogLine, LogSelection
from finetune_operator.observation.ownership import RawBody
from testing.builders.job_files import job_body
from testing.builders.jobs import NOW
from testing.fakes.http_api import ScriptedFault
from testing.fakes.job_api import NAMESPACE, JobApi, serve_jobs
from testing.processes.waiting import wait_in_event_loop

RUNNING = JobStatus(
    phase=Phase.RUNNING, attempt=1, attempts=(AttemptRecord(attempt=1, state=AttemptState.RUNNING, start_time=NOW),)
)
COMPLETE = RUNNING.model_copy(update={"phase": Phase.COMPLETE, "completion_time": NOW})
FAILED = RUNNING.model_copy(
    update={
        "phase": Phase.FAILED,
        "completion_time": NOW,
        "conditions": (
            Condition(type="Failed", status="True", last_transition_time=NOW, reason="DatasetError", message="row 3"),
        ),
    }
)


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("async_client", "job_logs"):
        monkeypatch.setattr(f"finetune_client.{module}.POLL_SECONDS", 0.01)
    monkeypatch.setattr("finetune_operator.kube.api_client.RETRY_DELAYS_SECONDS", (0.001, 0.001))


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[JobApi]:
    async with serve_jobs(tmp_path, JobApi()) as api:
        yield api


@pytest.fixture
async def client(api: JobApi, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(kubeconfig=str(tmp_path / "kubeconfig")) as client:
        yield client


async def test_namespace_is_that_of_the_context_unless_one_is_given(api: JobApi, tmp_path: Path) -> None:
    kubeconfig = str(tmp_path / "kubeconfig")
    async with (
        AsyncClient(kubeconfig=kubeconfig) as default,
        AsyncClient(kubeconfig=kubeconfig, namespace="x") as other,
    ):
        assert (default.namespace, other.namespace) == (NAMESPACE, "x")


async def test_a_missing_job_is_reported_by_name_with_status_404(client: AsyncClient) -> None:
    with pytest.raises(ClientError, match=r"finetunejobs\.finetune\.dev team/bert: .*not found") as raised:
        await client.get("bert")

    assert raised.value.status == 404
    assert await client.find("bert") is None


INVALID_NAMES = (
    "../x",
    "../../other/finetunejobs/j",
    "a/b",
    "",
    ".",
    "..",
    "a?b",
    "a#b",
    "a%2fb",
    "a.b",
    "A",
    "a" * 64,
    "-a",
    "a\n",
    "\u00e9",
)


@pytest.mark.parametrize("name", INVALID_NAMES)
async def test_names_that_no_job_can_have_are_refused_before_a_request(
    name: str, client: AsyncClient, api: JobApi, tmp_path: Path
) -> None:
    calls: tuple[Callable[[str], Awaitable[object]], ...] = (
        *(client.get, client.find, client.suspend, client.resume, client.cancel, client.delete),
        *(client.wait, client.get_result, client.list_events, client.list_ranks),
        lambda name: client.download(name, tmp_path / "copy"),
        lambda name: client.submit(job_body(name=name)),
        lambda name: client.check_pods(job_body(name=name)),
        lambda name: anext(client.watch(name)),
        lambda name: anext(client.read_logs(name, LogSelection())),
        lambda name: anext(client.read_output_file(name, "result")),
    )
    for call in calls:
        with pytest.raises(ClientError):
            await call(name)

    assert not api.requests


@pytest.mark.parametrize("namespace", [name for name in INVALID_NAMES if name])
async def test_namespaces_that_cannot_exist_are_refused_before_a_request(
    namespace: str, api: JobApi, tmp_path: Path
) -> None:
    with pytest.raises(ClientError, match=r"namespace .*: must have at most 63 characters a-z"):
        async with AsyncClient(kubeconfig=str(tmp_path / "kubeconfig"), namespace=namespace):
            pass

    assert not api.requests


@pytest.mark.parametrize("fields", [{"kind": "Deployment"}, {"apiVersion": "apps/v1"}, {"kind": None}])
async def test_objects_of_other_kinds_are_no_jobs(fields: RawBody, client: AsyncClient, api: JobApi) -> None:
    body = api.put_job(RUNNING)
    api.objects["finetunejobs", NAMESPACE, "bert"] = {**body, **fields}

    with pytest.raises(ClientError, match=r"expected a FineTuneJob of finetune\.dev/v1alpha1, found a "):
        await client.get("bert")


def test_the_synchronous_client_has_every_method_with_its_docstring() -> None:
    methods = {name: method for name, method in vars(AsyncClient).items() if not name.startswith("_")}

    assert len(methods) > 20
    assert {name: vars(Client)[name].__doc__ for name in methods} == {name: m.__doc__ for name, m in methods.items()}


async def test_a_client_can_be_closed_while_many_log_lines_are_unread(api: JobApi, tmp_path: Path) -> None:
    api.put_job(RUNNING)
    api.logs = {"bert-1-0": [f"2026-11-27T10:00:00.{number:09d}Z line" for number in range(5000)]}

    def read_first_line() -> str:
        with (
            Client(kubeconfig=str(tmp_path / "kubeconfig")) as client,
            closing(client.read_logs("bert")) as lines,
        ):
            return next(lines).text

    async with asyncio.timeout(20):
        assert await asyncio.to_thread(read_first_line) == "line"


async def test_list_returns_the_jobs_of_the_namespace_or_of_all(client: AsyncClient, api: JobApi) -> None:
    api.put_job(name="bert")
    metadata = {"name": "other", "creationTimestamp": (NOW - timedelta(hours=1)).isoformat()}
    api.put("finetunejobs", {**job_body(), "metadata": metadata}, namespace="elsewhere")

    assert [job.name for job in await client.list()] == ["bert"]
    assert [(job.namespace, job.name) for job in await client.list(all_namespaces=True)] == [
        ("elsewhere", "other"),
        (NAMESPACE, "bert"),
    ]


async def test_a_job_with_a_spec_of_another_release_can_be_listed_and_suspended(
    client: AsyncClient, api: JobApi
) -> None:
    api.put_job(RUNNING, numNodes="many")

    (job,) = await client.list()
    await client.suspend("bert")

    assert job.phase is Phase.RUNNING
    with pytest.raises(ClientError, match=r"spec\.numNodes"):
        _ = job.spec


async def test_submit_creates_the_job_in_the_namespace_of_the_client(client: AsyncClient, api: JobApi) -> None:
    job = await client.submit(job_body(name="bert"))

    assert (job.namespace, job.name) == (NAMESPACE, "bert")
    assert api.objects["finetunejobs", NAMESPACE, "bert"]["spec"] == job_body()["spec"]
    (request,) = api.find_requests("PATCH", "finetunejobs")
    assert (request.params["fieldManager"], request.params["fieldValidation"]) == ("finetune", "Strict")


async def test_submit_as_dry_run_creates_nothing(client: AsyncClient, api: JobApi) -> None:
    await client.submit(job_body(name="bert"), dry_run=True)

    assert api.find_requests("PATCH", "finetunejobs")[0].params["dryRun"] == "All"
    assert not api.objects


async def test_submit_over_a_finished_job_is_rejected(client: AsyncClient, api: JobApi) -> None:
    api.put_job(COMPLETE)

    with pytest.raises(ClientError, match=r"team/bert has ended \(Complete\); delete it, or choose another"):
        await client.submit(job_body(name="bert"))


async def test_rejection_by_the_api_server_contains_its_message(client: AsyncClient, api: JobApi) -> None:
    api.faults.append(ScriptedFault("PATCH", "finetunejobs", 422, message="spec.numNodes: is immutable"))

    with pytest.raises(ClientError, match=r"team/bert: spec\.numNodes: is immutable") as raised:
        await client.submit(job_body(name="bert"))

    assert raised.value.status == 422


@pytest.mark.parametrize(
    ("change", "spec"),
    [
        (AsyncClient.suspend, {"suspend": True}),
        (AsyncClient.resume, {"suspend": False}),
        (AsyncClient.cancel, {"cancel": True}),
    ],
    ids=["suspend", "resume", "cancel"],
)
async def test_suspend_resume_and_cancel_patch_only_that_field_of_this_job(
    change: Callable[[AsyncClient, str], Awaitable[object]], spec: dict[str, bool], client: AsyncClient, api: JobApi
) -> None:
    uid = api.put_job(RUNNING)["metadata"]["uid"]

    await change(client, "bert")

    (request,) = api.find_requests("PATCH", "finetunejobs")
    assert request.body == {"metadata": {"uid": uid}, "spec": spec}
    assert request.headers["Content-Type"] == "application/merge-patch+json"


async def test_a_finished_job_cannot_be_resumed(client: AsyncClient, api: JobApi) -> None:
    api.put_job(FAILED)

    with pytest.raises(ClientError, match=r"team/bert has ended \(Failed\) and cannot be resumed"):
        await client.resume("bert")


async def test_watch_yields_every_change_until_the_job_ends(client: AsyncClient, api: JobApi) -> None:
    api.put_job(RUNNING)
    phases = []
    async for job in client.watch("bert"):
        phases.append(job.phase)
        if job.phase is Phase.RUNNING:
            api.put_job(COMPLETE)

    assert phases == [Phase.RUNNING, Phase.COMPLETE]


async def test_watch_tolerates_an_outage_of_the_api_server(client: AsyncClient, api: JobApi) -> None:
    api.put_job(COMPLETE)
    api.faults.append(ScriptedFault("GET", "finetunejobs", 503, times=7))

    assert [job.phase async for job in client.watch("bert")] == [Phase.COMPLETE]


async def test_watch_ends_with_an_error_if_the_job_is_deleted(client: AsyncClient, api: JobApi) -> None:
    api.put_job(RUNNING)

    jobs = client.watch("bert")
    await anext(jobs)
    api.remove("finetunejobs", "bert", namespace=NAMESPACE)

    with pytest.raises(ClientError, match="not found"):
        await anext(jobs)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (WaitTarget.RUNNING, RUNNING),
        (WaitTarget.TRAINING, RUNNING.model_copy(update={"progress": Progress(step=1, total_steps=3)})),
        (WaitTarget.SUSPENDED, RUNNING.model_copy(update={"phase": Phase.SUSPENDED})),
        (WaitTarget.COMPLETE, COMPLETE),
        (WaitTarget.FINISHED, FAILED),
    ],
)
async def test_wait_returns_once_the_target_is_reached(
    target: WaitTarget, status: JobStatus, client: AsyncClient, api: JobApi
) -> None:
    api.put_job(JobStatus(phase=Phase.QUEUED))
    waiting = asyncio.create_task(client.wait("bert", target))
    await asyncio.sleep(0.03)
    assert not waiting.done()

    api.put_job(status)

    assert (await waiting).phase is status.phase


async def test_wait_for_running_returns_if_the_job_ends_before(client: AsyncClient, api: JobApi) -> None:
    api.put_job(FAILED)

    assert (await client.wait("bert", WaitTarget.RUNNING)).phase is Phase.FAILED


async def test_wait_ends_after_its_timeout_with_the_present_phase(client: AsyncClient, api: JobApi) -> None:
    api.put_job(RUNNING)

    with pytest.raises(WaitTimeout, match=r"team/bert is not finished after 0.05 s; its phase is Running"):
        await client.wait("bert", timeout_seconds=0.05)


async def test_result_of_a_failed_job_raises_its_reason(client: AsyncClient, api: JobApi) -> None:
    api.put_job(FAILED)

    with pytest.raises(JobFailed, match="bert: DatasetError: row 3"):
        await client.get_result("bert")


async def test_events_are_those_of_the_job_and_its_pods_in_order(client: AsyncClient, api: JobApi) -> None:
    uid = api.put_job(RUNNING)["metadata"]["uid"]

    def about(kind: str, name: str, uid: str = "") -> RawBody:
        return {"kind": kind, "name": name, "uid": uid}

    later = NOW + timedelta(seconds=5)
    api.put_event("a", about("Pod", "bert-1-0"), time=later, reason="FailedScheduling", type="Warning", note="no GPU")
    api.put_event("b", about("FineTuneJob", "bert", uid), time=NOW, reason="Starting", type="Normal")
    api.put_event("c", about("FineTuneJob", "bert", "of a deleted job"), time=NOW, reason="Failed")
    api.put_event("d", about("Pod", "bert-large-1-0"), time=NOW, reason="Pulled")

    events = await client.list_events("bert")

    assert [(event.about, event.reason, event.message) for event in events] == [
        ("bert", "Starting", ""),
        ("bert-1-0", "FailedScheduling", "no GPU"),
    ]


async def read_logs(client: AsyncClient, **selection: Any) -> list[LogLine]:
    return [line async for line in client.read_logs("bert", LogSelection(**selection))]


def log_line(text: str, second: int = 0) -> str:
    return f"2026-11-27T10:00:0{second}.000000000Z {text}"


async def test_logs_of_several_nodes_are_merged_with_their_ranks(client: AsyncClient, api: JobApi) -> None:
    api.put_job(RUNNING, numNodes=2)
    api.logs = {"bert-1-0": [log_line("step 1")], "bert-1-1": [log_line("ready")]}

    lines = await read_logs(client, nodes=None, tail_lines=5)

    assert sorted((line.node_rank, line.text) for line in lines) == [(0, "step 1"), (1, "ready")]
    assert {query["tailLines"] for _, query in api.log_requests} == {"5"}


async def test_followed_logs_continue_with_the_next_attempt(client: AsyncClient, api: JobApi) -> None:
    api.put_job(RUNNING)
    api.logs = {"bert-1-0": [log_line("first")]}
    lines = []
    async for line in client.read_logs("bert", LogSelection(follow=True)):
        lines.append((line.attempt, line.text))
        if line.text == "first":
            api.put_job(RUNNING.model_copy(update={"attempt": 2}))
            api.logs["bert-2-0"] = [log_line("second")]
        else:
            api.put_job(COMPLETE.model_copy(update={"attempt": 2}))

    assert lines == [(1, "first"), (2, "second")]


async def test_followed_logs_wait_for_the_container_and_repeat_no_line(client: AsyncClient, api: JobApi) -> None:
    api.put_job(RUNNING)
    api.put_pod("bert-1-0", phase="Running")
    lines = []

    async def follow() -> None:
        lines.extend(await read_logs(client, follow=True))

    task = asyncio.create_task(follow())
    await wait_in_event_loop(lambda: len(api.log_requests) > 1)  # the container waits to start
    api.logs["bert-1-0"] = [log_line("a", 1)]
    await wait_in_event_loop(
        lambda: any("sinceTime" in query for _, query in api.log_requests)
    )  # the stream ended early
    api.logs["bert-1-0"] = [log_line("a", 1), log_line("b", 2)]
    requests = len(api.log_requests)
    await wait_in_event_loop(lambda: len(api.log_requests) > requests + 1)
    api.put_job(COMPLETE)
    await task

    assert [line.text for line in lines] == ["a", "b"]


@pytest.mark.parametrize(
    ("status", "selection", "message"),
    [
        (JobStatus(), {}, r"bert: no attempt has started \(not processed by the operator yet\)"),
        (RUNNING, {"nodes": (2,)}, "bert has no node 2; its nodes are 0 to 1"),
        (RUNNING, {"attempt": 5}, "bert: there is no attempt 5; the current one is 1"),
        (RUNNING, {}, "log of pod team/bert-1-0: .*waiting to start"),
    ],
    ids=["not started", "unknown node", "unknown attempt", "container not started"],
)
async def test_logs_that_do_not_exist_are_reported(
    status: JobStatus, selection: dict[str, Any], message: str, client: AsyncClient, api: JobApi
) -> None:
    api.put_job(status, numNodes=2)

    with pytest.raises(ClientError, match=message):
        await read_logs(client, **selection)


async def test_synchronous_client_runs_in_a_thread_with_a_running_event_loop(api: JobApi, tmp_path: Path) -> None:
    api.put_job(RUNNING)
    api.logs = {"bert-1-0": [log_line("step 1")]}

    def use_client() -> tuple[Phase | None, list[str], list[Phase | None]]:
        with Client(kubeconfig=str(tmp_path / "kubeconfig")) as client:
            texts = [line.text for line in client.read_logs("bert")]
            phase = client.get("bert").phase
            api.put_job(COMPLETE)
            return phase, texts, [job.phase for job in client.watch("bert")]

    assert await asyncio.to_thread(use_client) == (Phase.RUNNING, ["step 1"], [Phase.COMPLETE])


def test_a_client_without_a_cluster_raises_at_its_creation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))

    with pytest.raises(ClientError, match="no access to a cluster: no kubeconfig found"):
        Client()
