"""Tests of the operator process against an in-memory API server."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import yaml
from yarl import URL

from finetune_operator.__main__ import build_options, parse_flags
from finetune_operator.notifications.sink import SinkConfig
from finetune_operator.observation.ownership import RawBody
from testing.builders.jobs import spec
from testing.fakes.http_api import HttpApi, RecordedRequest, ScriptedFault, serve_api
from testing.fakes.notification_sink import serve_sink
from testing.processes.waiting import wait_in_event_loop

REPOSITORY = Path(__file__).parents[4]
# The operator with shorter intervals
PROGRAM = """
import runpy
from finetune_operator.manager import kopf_watch, leader_election, manager
kopf_watch.RELOGIN_SECONDS = leader_election.RETRY_PERIOD_SECONDS = manager.RETRY_INTERVAL_SECONDS = 0.1
runpy.run_module("finetune_operator", run_name="__main__", alter_sys=True)
"""


@dataclass
class OperatorProcess:
    """Running operator process with its log records and the port of its probes."""

    process: asyncio.subprocess.Process
    port: int
    records: list[RawBody] = field(default_factory=list)

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.records.append(json.loads(line))

    def has_logged(self, message: str) -> bool:
        return any(message in record["message"] for record in self.records)

    async def get(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}{path}") as response:
            return response.status, await response.text()


@asynccontextmanager
async def running_operator(
    url: str, folder: Path, *flags: str, user: RawBody | None = None
) -> AsyncIterator[OperatorProcess]:
    with socket.create_server(("", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    kubeconfig = folder / "kubeconfig"
    entry = {"name": "test"}
    context = {**entry, "context": {"cluster": "test", "user": "test"}}
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "current-context": "test",
                "contexts": [context],
                "clusters": [{**entry, "cluster": {"server": url}}],
                "users": [{**entry, "user": user or {}}],
            }
        )
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, "--kubeconfig", str(kubeconfig), "--metrics-port", str(port)),
        *("--trainer-image", "registry.example/trainer:1", *flags),
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}/operator:{REPOSITORY}/trainer"},
        stderr=asyncio.subprocess.PIPE,
    )
    operator = OperatorProcess(process, port)
    log_task = asyncio.create_task(operator.read_log())
    try:
        yield operator
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await log_task


def put_job(api: HttpApi, name: str = "bert", *, namespace: str = "default") -> RawBody:
    metadata = {"name": name, "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    claims = {"spec": {"accessModes": ["ReadWriteMany"]}}
    for claim in ("models", "datasets"):
        if ("persistentvolumeclaims", namespace, claim) not in api.objects:
            api.put("persistentvolumeclaims", {"metadata": {"name": claim}, **claims}, namespace=namespace)
    return api.put("finetunejobs", {"metadata": metadata, "spec": spec()}, namespace=namespace)


def list_names(api: HttpApi, plural: str) -> list[str]:
    return sorted(name for kind, _, name in api.objects if kind == plural)


async def test_the_status_is_written_before_the_children_are_created(api: HttpApi, tmp_path: Path) -> None:
    async with serve_api(api) as url, running_operator(url, tmp_path) as operator:
        await wait_in_event_loop(lambda: operator.has_logged("leading"))
        put_job(api)
        await wait_in_event_loop(lambda: list_names(api, "pods") == ["bert-0-0", "bert-0-1"])
        await wait_in_event_loop(
            lambda: list_names(api, "services") == ["bert"] and len(list_names(api, "configmaps")) == 1
        )
    writes = [
        (r.method, r.resource.plural)
        for r in api.requests
        if r.method in ("PUT", "POST") and r.resource.plural != "leases"
    ]
    assert writes[0] == ("PUT", "finetunejobs")
    assert [record for record in operator.records if record["level"] != "INFO"] == []
    assert not [r for r in api.requests if r.method == "PATCH"], "kopf must not patch a job"
    job = api.objects["finetunejobs", "default", "bert"]
    assert job["metadata"].keys().isdisjoint({"annotations", "finalizers"})


async def test_job_created_before_the_operator_starts_is_reconciled(api: HttpApi, tmp_path: Path) -> None:
    put_job(api)
    async with serve_api(api) as url, running_operator(url, tmp_path):
        await wait_in_event_loop(lambda: len(list_names(api, "pods")) == 2)


async def test_sigterm_ends_the_process_and_releases_the_lease(api: HttpApi, tmp_path: Path) -> None:
    async with serve_api(api) as url, running_operator(url, tmp_path) as operator:
        await wait_in_event_loop(lambda: operator.has_logged("leading"))
        operator.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(operator.process.wait(), 30) == 0
    assert api.objects["leases", "default", "finetune-operator"]["spec"]["holderIdentity"] == ""


async def test_standby_reconciles_no_job_until_the_leader_stops(api: HttpApi, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    async with serve_api(api) as url, running_operator(url, tmp_path) as one:
        await wait_in_event_loop(lambda: one.has_logged("leading"))
        async with running_operator(url, tmp_path / "two") as two:
            await wait_in_event_loop(lambda: two.has_logged("watching"))
            one.process.send_signal(signal.SIGSTOP)  # pauses the leader, so that only the standby can act
            put_job(api)
            await asyncio.sleep(0.5)
            assert list_names(api, "pods") == []
            assert (await two.get("/readyz")) == (200, "ok"), "a warm standby is ready"
            one.process.send_signal(signal.SIGCONT)
            one.process.send_signal(signal.SIGTERM)
            await wait_in_event_loop(lambda: two.has_logged("leading"))
            await wait_in_event_loop(lambda: len(list_names(api, "pods")) == 2)


async def test_leader_exits_immediately_after_losing_the_lease(api: HttpApi, tmp_path: Path) -> None:
    async with serve_api(api) as url, running_operator(url, tmp_path) as operator:
        await wait_in_event_loop(lambda: operator.has_logged("leading"))
        taken = {**api.objects["leases", "default", "finetune-operator"]["spec"], "holderIdentity": "other"}
        api.put("leases", {"metadata": {"name": "finetune-operator"}, "spec": taken})
        assert await asyncio.wait_for(operator.process.wait(), 30) == 1
    assert operator.has_logged("no longer the leader")
    assert api.objects["leases", "default", "finetune-operator"]["spec"]["holderIdentity"] == "other"


async def test_only_jobs_of_the_configured_namespaces_are_reconciled(api: HttpApi, tmp_path: Path) -> None:
    async with (
        serve_api(api) as url,
        running_operator(url, tmp_path, "--namespace", "one", "--namespace", "two") as operator,
    ):
        await wait_in_event_loop(lambda: operator.has_logged("leading"))
        for namespace in ("one", "two", "three"):
            put_job(api, namespace=namespace)
        await wait_in_event_loop(lambda: len(list_names(api, "pods")) == 4)
    assert {r.resource.namespace for r in api.requests if r.resource.plural == "pods"} == {"one", "two"}


async def test_the_operator_survives_an_outage_of_the_api_server(api: HttpApi, tmp_path: Path) -> None:
    async with serve_api(api) as url, running_operator(url, tmp_path) as operator:
        await wait_in_event_loop(lambda: operator.has_logged("leading"))
        outage = [
            ScriptedFault(method, plural, 0, times=4)
            for method in ("GET", "POST", "PUT")
            for plural in ("pods", "finetunejobs")
        ]
        api.faults += outage
        api.close_watches()
        put_job(api)
        await wait_in_event_loop(lambda: len(list_names(api, "pods")) == 2)
        assert operator.process.returncode is None


async def test_all_connections_use_the_rotated_token(api: HttpApi, tmp_path: Path) -> None:
    token = tmp_path / "token"
    api.allowed_token = "one"  # noqa: S105
    token.write_text("one")
    async with serve_api(api) as url, running_operator(url, tmp_path, user={"tokenFile": "token"}) as operator:
        await wait_in_event_loop(lambda: operator.has_logged("leading") and api.open_watch_count == 3)
        api.allowed_token = "another"  # noqa: S105
        api.close_watches()
        await wait_in_event_loop(lambda: bool([r for r in api.requests[-3:] if "one" in r.headers["Authorization"]]))
        await asyncio.sleep(0.5)  # all requests are rejected during this half second
        token.write_text("another")
        put_job(api)
        await wait_in_event_loop(lambda: len(list_names(api, "pods")) == 2)
        assert operator.process.returncode is None
    assert not any("another" in json.dumps(record) for record in operator.records), "no secrets in the log"


async def test_permanent_error_of_the_job_watch_ends_the_process(api: HttpApi, tmp_path: Path) -> None:
    """kopf does not retry after such an error, so the process must exit and let another replica take over."""
    async with serve_api(api) as url, running_operator(url, tmp_path) as operator:
        await wait_in_event_loop(lambda: operator.has_logged("leading") and api.open_watch_count == 3)
        api.send({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "internal error"}})
        assert await asyncio.wait_for(operator.process.wait(), 30) == 1
    assert api.objects["leases", "default", "finetune-operator"]["spec"]["holderIdentity"] == ""


async def test_restore_of_etcd_from_a_backup_ends_the_process(api: HttpApi, tmp_path: Path) -> None:
    """Watches at a version of the lost state deliver nothing, so the operator reads everything anew after a restart."""
    async with serve_api(api) as url, running_operator(url, tmp_path) as operator:
        await wait_in_event_loop(lambda: operator.has_logged("leading") and api.open_watch_count == 3)
        api.faults.append(ScriptedFault("GET", "pods", 410))
        api.restore(1)
        assert await asyncio.wait_for(operator.process.wait(), 30) == 1
    assert "etcd was restored from a backup" in json.dumps(operator.records)
    assert api.objects["leases", "default", "finetune-operator"]["spec"]["holderIdentity"] == ""


async def test_jobs_are_listed_again_in_small_pages_once_a_standby_leads(api: HttpApi, tmp_path: Path) -> None:
    async with serve_api(api) as url, running_operator(url, tmp_path) as operator:
        await wait_in_event_loop(lambda: operator.has_logged("leading"))
        await wait_in_event_loop(lambda: len(list_job_lists(api)) == 3)  # at the start, by kopf, and as the leader
    assert {request.params["limit"] for request in list_job_lists(api)} == {"50"}


def list_job_lists(api: HttpApi) -> list[RecordedRequest]:
    return [request for request in api.find_requests("GET", "finetunejobs") if "watch" not in request.params]


async def test_operator_waits_and_logs_a_warning_if_the_crd_is_missing(api: HttpApi, tmp_path: Path) -> None:
    api.faults.append(ScriptedFault("GET", "", 404, times=1))
    async with serve_api(api) as url, running_operator(url, tmp_path) as operator:
        await wait_in_event_loop(lambda: operator.has_logged("does not serve finetunejobs.finetune.dev"))
        assert (await operator.get("/readyz"))[0] == 503
        assert (await operator.get("/healthz"))[0] == 200
        await wait_in_event_loop(lambda: operator.has_logged("leading"))


async def test_a_sink_that_does_not_respond_delays_no_job(api: HttpApi, tmp_path: Path) -> None:
    async with serve_api(api) as url, serve_sink() as sink:
        sink.responds.clear()
        async with running_operator(url, tmp_path, "--notification-url", sink.url) as operator:
            for number in range(10):
                put_job(api, f"job-{number}")
            await wait_in_event_loop(lambda: len(list_names(api, "pods")) == 20 and len(sink.received) > 0)
            assert (await operator.get("/healthz"))[0] == 200


async def test_a_standby_sends_no_notifications(api: HttpApi, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    async with serve_api(api) as url, serve_sink() as sink, running_operator(url, tmp_path) as leader:
        await wait_in_event_loop(lambda: leader.has_logged("leading"))
        async with running_operator(url, tmp_path / "two", "--notification-url", sink.url) as standby:
            await wait_in_event_loop(lambda: standby.has_logged("watching"))
            put_job(api)
            await wait_in_event_loop(lambda: len(list_names(api, "pods")) == 2)
            assert sink.received == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(["--trainer-image", ""], "--trainer-image is missing", id="no image"),
        pytest.param(["--workers", "0"], "--workers: 0: must be at least 1", id="no workers"),
        pytest.param(
            ["--default-ttl-seconds", "1d"], "1d: must be a number of seconds, or empty", id="TTL with a unit"
        ),
        pytest.param(["--default-ttl-seconds", "-1"], "-1: must be a number of seconds, or empty", id="negative TTL"),
        pytest.param(["--notification-url", "sink.example"], "must begin with http", id="URL without a scheme"),
        pytest.param(["--max-job-metrics", "-1"], "-1: must not be negative", id="negative number of jobs"),
        pytest.param(["--log-level", "loud"], "--log-level: loud: must be one of", id="unknown level"),
    ],
)
def test_invalid_flag_ends_the_process_with_a_message(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_flags(["--trainer-image", "x", *flags], {})
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_switch_with_another_value_than_true_or_false_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags([], {"FINETUNE_TRAINER_IMAGE": "x", "FINETUNE_DELETE_FINISHED_JOBS": "no"})
    assert "FINETUNE_DELETE_FINISHED_JOBS: found no; set it to true or false" in capsys.readouterr().err


def test_flags_override_environment_variables() -> None:
    environment = {
        "FINETUNE_TRAINER_IMAGE": "env",
        "FINETUNE_NAMESPACES": "one,two",
        "FINETUNE_LEADER_ELECTION": "false",
        "FINETUNE_DELETE_FINISHED_JOBS": "False",
        "FINETUNE_WORKERS": "3",
    }
    options = build_options(parse_flags([], environment))
    assert (options.settings.trainer_image, options.namespaces) == ("env", ("one", "two"))
    assert (options.leader_election, options.workers) == (False, 3)
    assert not options.settings.delete_finished_jobs
    flags = ["--trainer-image", "flag", "--namespace", "three", "--leader-election", "--workers", "4"]
    options = build_options(parse_flags(flags, environment))
    assert (options.settings.trainer_image, options.namespaces) == ("flag", ("three",))
    assert (options.leader_election, options.workers) == (True, 4)


@pytest.mark.parametrize(("text", "seconds"), [("", None), ("0", 0), ("86400", 86400)])
def test_default_ttl_is_read_from_the_environment(text: str, seconds: int | None) -> None:
    environment = {"FINETUNE_TRAINER_IMAGE": "x", "FINETUNE_DEFAULT_TTL_SECONDS": text}
    assert build_options(parse_flags([], environment)).settings.default_ttl_seconds == seconds


def test_notifications_are_configured_by_environment_variables() -> None:
    environment = {
        "FINETUNE_TRAINER_IMAGE": "x",
        "FINETUNE_NOTIFICATION_URL": "https://sink.example/events",
        "FINETUNE_NOTIFICATION_SOURCE": "https://cluster.example",
        "FINETUNE_NOTIFICATION_SECRETS": "/etc/finetune/notifications",
    }

    assert build_options(parse_flags([], environment)).sink == SinkConfig(
        URL("https://sink.example/events"), "https://cluster.example", Path("/etc/finetune/notifications")
    )
    without_url = build_options(parse_flags([], {**environment, "FINETUNE_NOTIFICATION_URL": ""})).sink
    assert without_url is not None
    assert without_url.url is None
    assert build_options(parse_flags([], {"FINETUNE_TRAINER_IMAGE": "x"})).sink is None


async def test_a_missing_kubeconfig_ends_the_process_with_a_message(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "finetune_operator", "--trainer-image", "x", "--kubeconfig", str(tmp_path / "none")),
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}/operator:{REPOSITORY}/trainer"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate()
    assert process.returncode == 2
    assert json.loads(error)["message"].startswith("no kubeconfig found")


def test_objects_with_the_maximum_nesting_of_the_api_server_can_be_read_and_written() -> None:
    """The API server limits the nesting of JSON to 10,000 levels; a child process has the stack of the operator."""
    program = (
        "import json, sys\n"
        "from finetune_operator.__main__ import RECURSION_LIMIT\n"
        "sys.setrecursionlimit(RECURSION_LIMIT)\n"
        "text = '{\"a\": ' * 10_000 + '1' + '}' * 10_000\n"
        "assert json.dumps(json.loads(text)) == text\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
