"""What the operator counts about itself, and when it calls itself unwell."""

import asyncio

import aiohttp
import pytest
from prometheus_client import generate_latest

from finetune_operator.kube.api_client import ApiError
from finetune_operator.manager.health import Health, LastContact, LoopLag, not_longer_than, serve
from finetune_operator.metrics import CountRequests, Metrics, describe_request
from testing.fakes.api_client import connected
from testing.fakes.http_api import Fault, HttpApi


@pytest.mark.parametrize(
    ("method", "path", "watches", "described"),
    [
        ("GET", "/api/v1/pods", False, ("list", "pods")),
        ("GET", "/api/v1/pods", True, ("watch", "pods")),
        ("GET", "/api/v1/namespaces/team/pods", False, ("list", "pods")),
        ("GET", "/api/v1/namespaces/team/pods/a-0-0", False, ("get", "pods")),
        ("POST", "/api/v1/namespaces/team/pods", False, ("create", "pods")),
        ("DELETE", "/api/v1/namespaces/team/pods/a-0-0", False, ("delete", "pods")),
        (
            "PUT",
            "/apis/finetune.dev/v1alpha1/namespaces/t/finetunejobs/a/status",
            False,
            ("update", "finetunejobs/status"),
        ),
        ("GET", "/apis/finetune.dev/v1alpha1", False, ("get", "discovery")),
        ("GET", "/api", False, ("get", "discovery")),
        ("GET", "/version", False, ("get", "discovery")),
    ],
)
def test_requests_are_named_as_rbac_names_them(
    method: str, path: str, watches: bool, described: tuple[str, str]
) -> None:
    assert describe_request(method, path, watches=watches) == described


async def test_every_answer_is_counted_and_every_lack_of_one() -> None:
    api, metrics, contact = HttpApi(), Metrics(), LastContact()
    api.faults += [Fault("GET", "pods", 500), Fault("GET", "pods", 0, times=2)]  # aiohttp asks twice where it may
    async with connected(api, CountRequests(metrics.requests), contact) as server:
        await server.call("GET", "/api/v1/pods")
    counted = {
        code: metrics.registry.get_sample_value(
            "finetune_api_requests_total", {"verb": "list", "resource": "pods", "code": code}
        )
        for code in ("200", "500", "none")
    }
    assert counted["200"] == 1
    assert counted["500"] == 1
    assert counted["none"]
    assert contact.age_seconds() < 5


async def test_figures_are_read_when_they_are_asked_for() -> None:
    metrics, depth = Metrics(), {"": 1.0}
    phases: dict[str, float] = {}
    metrics.scrape("finetune_queue_depth", "Depth.", read=lambda: depth)
    metrics.scrape("finetune_jobs", "Jobs.", label="phase", read=lambda: phases)
    depth[""] = 5.0
    phases["Running"] = 2.0
    text = generate_latest(metrics.registry).decode()
    assert "finetune_queue_depth 5.0" in text
    assert 'finetune_jobs{phase="Running"} 2.0' in text
    assert "process_cpu_seconds_total" in text


async def test_probes_tell_what_is_wrong() -> None:
    health, stuck = Health(), 0.0
    health.alive_if("passes", not_longer_than(300, lambda: stuck, "one pass has been running"))
    health.ready_if("start", lambda: "not yet")
    runner = await serve(health, Metrics(), port=0, host="127.0.0.1")
    port = runner.addresses[0][1]

    async def probe(path: str) -> tuple[int, str]:
        async with session.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, await response.text()

    async with aiohttp.ClientSession() as session:
        assert await probe("/healthz") == (200, "ok")
        assert await probe("/readyz") == (503, "start: not yet")
        stuck = 301.0
        assert await probe("/healthz") == (503, "passes: one pass has been running for 301 s (limit 300 s)")
        assert (await probe("/metrics"))[0] == 200
    await runner.cleanup()


async def test_a_blocked_event_loop_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    monkeypatch.setattr("finetune_operator.manager.health.LAG_INTERVAL", 0.05)
    lag = LoopLag(metrics)
    running = asyncio.create_task(lag.run())
    await asyncio.sleep(0.12)
    assert lag.worst_seconds < 0.2
    busy_until = asyncio.get_running_loop().time() + 0.4
    while asyncio.get_running_loop().time() < busy_until:
        pass
    await asyncio.sleep(0.1)
    running.cancel()
    assert lag.worst_seconds > 0.25
    assert metrics.registry.get_sample_value("finetune_event_loop_lag_seconds") == lag.worst_seconds


async def test_a_refusal_is_contact() -> None:
    api, contact = HttpApi(), LastContact()
    api.faults.append(Fault("GET", "pods", 403))
    async with connected(api, contact) as server:
        contact._time -= 100
        with pytest.raises(ApiError):
            await server.call("GET", "/api/v1/pods")
    assert contact.age_seconds() < 5
