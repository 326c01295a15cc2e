"""The whole operator as a process, from its flags to its exit code, against an API server in memory."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from finetune_operator.__main__ import build_options, parse_flags
from testing.builders.jobs import spec
from testing.fakes.http_api import Fault, HttpApi, serving

REPOSITORY = Path(__file__).parents[4]
Raw = dict[str, Any]


@dataclass
class Operator:
    """A running process, the records it logs, and the port of its probes."""

    process: asyncio.subprocess.Process
    port: int
    records: list[Raw] = field(default_factory=list)

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.records.append(json.loads(line))

    def said(self, message: str) -> bool:
        return any(message in record["message"] for record in self.records)

    async def ask(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}{path}") as response:
            return response.status, await response.text()


@asynccontextmanager
async def running(url: str, folder: Path, *flags: str, user: Raw | None = None) -> AsyncIterator[Operator]:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    kubeconfig = folder / "kubeconfig"
    named = {"name": "test"}
    context = {**named, "context": {"cluster": "test", "user": "test"}}
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "current-context": "test",
                "contexts": [context],
                "clusters": [{**named, "cluster": {"server": url}}],
                "users": [{**named, "user": user or {}}],
            }
        )
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "finetune_operator", "--kubeconfig", str(kubeconfig), "--metrics-port", str(port)),
        *("--trainer-image", "registry.example/trainer:1", *flags),
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}/operator:{REPOSITORY}/trainer"},
        stderr=asyncio.subprocess.PIPE,
    )
    operator = Operator(process, port)
    reading = asyncio.create_task(operator.read_log())
    try:
        yield operator
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def put_job(api: HttpApi, name: str = "bert", *, namespace: str = "default") -> Raw:
    metadata = {"name": name, "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    claims = {"spec": {"accessModes": ["ReadWriteMany"]}}
    for claim in ("models", "datasets"):
        if ("persistentvolumeclaims", namespace, claim) not in api.objects:
            api.put("persistentvolumeclaims", {"metadata": {"name": claim}, **claims}, namespace=namespace)
    return api.put("finetunejobs", {"metadata": metadata, "spec": spec()}, namespace=namespace)


def names_of(api: HttpApi, plural: str) -> list[str]:
    return sorted(name for kind, _, name in api.objects if kind == plural)


async def test_a_job_gets_its_children_after_its_status(tmp_path: Path) -> None:
    api = HttpApi()
    async with serving(api) as url, running(url, tmp_path) as operator:
        await until(lambda: operator.said("leading"))
        put_job(api)
        await until(lambda: names_of(api, "pods") == ["bert-0-0", "bert-0-1"])
        await until(lambda: names_of(api, "services") == ["bert"] and names_of(api, "configmaps") == ["bert-0"])
    writes = [
        (r.method, r.place.plural) for r in api.requests if r.method in ("PUT", "POST") and r.place.plural != "leases"
    ]
    assert writes[0] == ("PUT", "finetunejobs")
    assert [record for record in operator.records if record["level"] != "INFO"] == []
    assert not [r for r in api.requests if r.method == "PATCH"], "kopf leaves no mark on a job"
    job = api.objects["finetunejobs", "default", "bert"]
    assert job["metadata"].keys().isdisjoint({"annotations", "finalizers"})


async def test_a_job_from_before_the_start_is_found(tmp_path: Path) -> None:
    api = HttpApi()
    put_job(api)
    async with serving(api) as url, running(url, tmp_path):
        await until(lambda: len(names_of(api, "pods")) == 2)


async def test_sigterm_ends_the_process_and_frees_the_lease(tmp_path: Path) -> None:
    api = HttpApi()
    async with serving(api) as url, running(url, tmp_path) as operator:
        await until(lambda: operator.said("leading"))
        operator.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(operator.process.wait(), 30) == 0
    assert api.objects["leases", "default", "finetune-operator"]["spec"]["holderIdentity"] == ""


async def test_a_standby_does_nothing_until_the_leader_goes(tmp_path: Path) -> None:
    api = HttpApi()
    (tmp_path / "two").mkdir()
    async with serving(api) as url, running(url, tmp_path) as one:
        await until(lambda: one.said("leading"))
        async with running(url, tmp_path / "two") as two:
            await until(lambda: two.said("watching"))
            one.process.send_signal(signal.SIGSTOP)  # so that only the standby could act
            put_job(api)
            await asyncio.sleep(0.5)
            assert names_of(api, "pods") == []
            assert (await two.ask("/readyz")) == (200, "ok"), "a warm standby is ready"
            one.process.send_signal(signal.SIGCONT)
            one.process.send_signal(signal.SIGTERM)
            await until(lambda: two.said("leading"))
            await until(lambda: len(names_of(api, "pods")) == 2)


async def test_a_leader_that_cannot_renew_exits_at_once(tmp_path: Path) -> None:
    api = HttpApi()
    async with serving(api) as url, running(url, tmp_path) as operator:
        await until(lambda: operator.said("leading"))
        taken = {**api.objects["leases", "default", "finetune-operator"]["spec"], "holderIdentity": "somebody"}
        api.put("leases", {"metadata": {"name": "finetune-operator"}, "spec": taken})
        assert await asyncio.wait_for(operator.process.wait(), 30) == 1
    assert operator.said("no longer the leader")
    assert api.objects["leases", "default", "finetune-operator"]["spec"]["holderIdentity"] == "somebody"


async def test_only_the_named_namespaces_are_served(tmp_path: Path) -> None:
    api = HttpApi()
    async with serving(api) as url, running(url, tmp_path, "--namespace", "one", "--namespace", "two") as operator:
        await until(lambda: operator.said("leading"))
        for namespace in ("one", "two", "three"):
            put_job(api, namespace=namespace)
        await until(lambda: len(names_of(api, "pods")) == 4)
    assert {r.place.namespace for r in api.requests if r.place.plural == "pods"} == {"one", "two"}


async def test_a_deletion_that_no_watch_told_is_noticed_by_the_next_pass(tmp_path: Path) -> None:
    api = HttpApi()
    async with serving(api) as url, running(url, tmp_path) as operator:
        put_job(api)
        await until(lambda: len(names_of(api, "pods")) == 2)
        api.remove("finetunejobs", "bert", silently=True)
        for name in names_of(api, "pods"):
            body = api.objects["pods", "default", name]
            api.put("pods", {**body, "status": {"phase": "Running", "podIP": "127.0.0.1"}})
        async with asyncio.timeout(20):
            while "finetune_jobs{phase=" in (await operator.ask("/metrics"))[1]:  # noqa: ASYNC110  another process
                await asyncio.sleep(0.1)


async def test_the_api_server_may_go_away_and_come_back(tmp_path: Path) -> None:
    api = HttpApi()
    async with serving(api) as url, running(url, tmp_path) as operator:
        await until(lambda: operator.said("leading"))
        away = [
            Fault(method, plural, 0, times=4)
            for method in ("GET", "POST", "PUT")
            for plural in ("pods", "finetunejobs")
        ]
        api.faults += away
        api.end_watches()
        put_job(api)
        await until(lambda: len(names_of(api, "pods")) == 2)
        assert operator.process.returncode is None


async def test_a_rotated_token_is_taken_up_by_everybody(tmp_path: Path) -> None:
    api, token = HttpApi(), tmp_path / "token"
    api.allowed_token = "one"  # noqa: S105
    token.write_text("one")
    async with serving(api) as url, running(url, tmp_path, user={"tokenFile": "token"}) as operator:
        await until(lambda: operator.said("leading") and api.watches == 3)
        api.allowed_token = "another"  # noqa: S105
        api.end_watches()
        await until(lambda: bool([r for r in api.requests[-3:] if "one" in r.headers["Authorization"]]))
        await asyncio.sleep(0.5)  # everybody is refused
        token.write_text("another")
        put_job(api)
        await until(lambda: len(names_of(api, "pods")) == 2)
        assert operator.process.returncode is None
    assert not any("another" in json.dumps(record) for record in operator.records), "no secrets in the log"


async def test_a_watch_of_jobs_that_cannot_go_on_ends_the_process(tmp_path: Path) -> None:
    """kopf gives up on such an error; a new process starts afresh, and another replica takes over meanwhile."""
    api = HttpApi()
    async with serving(api) as url, running(url, tmp_path) as operator:
        await until(lambda: operator.said("leading") and api.watches == 3)
        api.send({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "internal error"}})
        assert await asyncio.wait_for(operator.process.wait(), 30) == 1
    assert api.objects["leases", "default", "finetune-operator"]["spec"]["holderIdentity"] == ""


async def test_without_the_crd_the_operator_waits_and_says_so(tmp_path: Path) -> None:
    api = HttpApi()
    api.faults.append(Fault("GET", "", 404, times=1))
    async with serving(api) as url, running(url, tmp_path) as operator:
        await until(lambda: operator.said("does not serve finetunejobs.finetune.dev"))
        assert (await operator.ask("/readyz"))[0] == 503
        assert (await operator.ask("/healthz"))[0] == 200
        await until(lambda: operator.said("leading"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(["--trainer-image", ""], "--trainer-image is missing", id="no image"),
        pytest.param(["--workers", "0"], "--workers: 0: must be at least 1", id="no workers"),
        pytest.param(["--log-level", "loud"], "--log-level: loud: must be one of", id="no such level"),
    ],
)
def test_bad_flags_end_the_program_with_their_name(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_flags(["--trainer-image", "x", *flags], {})
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


def test_flags_come_from_the_environment_and_beat_it() -> None:
    environment = {
        "FINETUNE_TRAINER_IMAGE": "env",
        "FINETUNE_NAMESPACES": "one,two",
        "FINETUNE_LEADER_ELECTION": "false",
        "FINETUNE_WORKERS": "3",
    }
    options = build_options(parse_flags([], environment))
    assert (options.settings.trainer_image, options.namespaces) == ("env", ("one", "two"))
    assert (options.leader_election, options.workers) == (False, 3)
    flags = ["--trainer-image", "flag", "--namespace", "three", "--leader-election", "--workers", "4"]
    options = build_options(parse_flags(flags, environment))
    assert (options.settings.trainer_image, options.namespaces) == ("flag", ("three",))
    assert (options.leader_election, options.workers) == (True, 4)


async def test_a_kubeconfig_that_is_not_there_ends_the_program_with_words(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "finetune_operator", "--trainer-image", "x", "--kubeconfig", str(tmp_path / "none")),
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}/operator:{REPOSITORY}/trainer"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate()
    assert process.returncode == 2
    assert json.loads(error)["message"].startswith("no kubeconfig found")
