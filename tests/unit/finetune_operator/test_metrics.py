"""Tests of the metrics, health checks and probes of the operator."""

import asyncio

import aiohttp
import pytest
from prometheus_client import generate_latest

from finetune_operator.kube.api_client import ApiError
from finetune_operator.kube.api_paths import collection_path
from finetune_operator.manager.health import (
    EventLoopLag,
    Health,
    LastRequestTime,
    build_duration_check,
    start_http_server,
)
from finetune_operator.metrics import Metrics, RequestCounter, describe_request
from testing.fakes.api_client import serve_and_connect
from testing.fakes.http_api import HttpApi, ScriptedFault
from testing.processes.ip_support import requires_ipv6


@pytest.mark.parametrize(
    ("method", "path", "is_watch", "expected_labels"),
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
def test_requests_are_labelled_with_their_rbac_verb_and_resource(
    method: str, path: str, is_watch: bool, expected_labels: tuple[str, str]
) -> None:
    assert describe_request(method, path, is_watch=is_watch) == expected_labels


async def test_responses_and_missing_responses_are_counted_by_code(api: HttpApi) -> None:
    metrics, last_request = Metrics(), LastRequestTime()
    # two missing responses, because aiohttp retries idempotent requests once
    api.faults += [ScriptedFault("GET", "pods", 500), ScriptedFault("GET", "pods", 0, times=2)]
    async with serve_and_connect(api, RequestCounter(metrics.requests), last_request) as server:
        await server.call("GET", collection_path("Pod", None))
    counts = {
        code: metrics.registry.get_sample_value(
            "finetune_api_requests_total", {"verb": "list", "resource": "pods", "code": code}
        )
        for code in ("200", "500", "none")
    }
    assert counts["200"] == 1
    assert counts["500"] == 1
    assert counts["none"]
    assert last_request.seconds_since_request() < 5


async def test_gauges_are_read_at_each_scrape() -> None:
    metrics, depth = Metrics(), {"": 1.0}
    phases: dict[str, float] = {}
    metrics.register_gauge("finetune_queue_depth", "Depth.", read_values=lambda: depth)
    metrics.register_gauge("finetune_jobs", "Jobs.", label="phase", read_values=lambda: phases)
    depth[""] = 5.0
    phases["Running"] = 2.0
    text = generate_latest(metrics.registry).decode()
    assert "finetune_queue_depth 5.0" in text
    assert 'finetune_jobs{phase="Running"} 2.0' in text
    assert "process_cpu_seconds_total" in text


async def test_probes_report_the_failed_checks() -> None:
    health, pass_seconds = Health(), 0.0
    health.add_liveness_check("passes", build_duration_check(300, lambda: pass_seconds, "one pass has been running"))
    health.add_readiness_check("start", lambda: "not yet")
    runner = await start_http_server(health, Metrics(), port=0, host="127.0.0.1")
    port = runner.addresses[0][1]

    async def probe(path: str) -> tuple[int, str]:
        async with session.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, await response.text()

    async with aiohttp.ClientSession() as session:
        assert await probe("/healthz") == (200, "ok")
        assert await probe("/readyz") == (503, "start: not yet")
        pass_seconds = 301.0
        assert await probe("/healthz") == (503, "passes: one pass has been running for 301 s (limit 300 s)")
        assert (await probe("/metrics"))[0] == 200
    await runner.cleanup()


@requires_ipv6
async def test_probes_are_served_over_both_ip_families() -> None:
    runner = await start_http_server(Health(), Metrics(), port=0)
    ports = {":" in host: port for host, port, *_ in runner.addresses}

    async with aiohttp.ClientSession() as session:
        for url in (f"http://127.0.0.1:{ports[False]}/healthz", f"http://[::1]:{ports[True]}/healthz"):
            async with session.get(url) as response:
                assert response.status == 200
    await runner.cleanup()


async def test_a_blocked_event_loop_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    monkeypatch.setattr("finetune_operator.manager.health.LAG_INTERVAL_SECONDS", 0.05)
    lag, started_at = EventLoopLag(metrics), asyncio.get_running_loop().time()
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0.12)
    busy_until = asyncio.get_running_loop().time() + 0.4
    while asyncio.get_running_loop().time() < busy_until:
        pass
    await asyncio.sleep(0.1)
    task.cancel()
    assert 0.25 < lag.worst_seconds < asyncio.get_running_loop().time() - started_at
    assert metrics.registry.get_sample_value("finetune_event_loop_lag_seconds") == lag.worst_seconds


async def test_error_response_counts_as_contact_with_the_api_server(api: HttpApi) -> None:
    last_request = LastRequestTime()
    api.faults.append(ScriptedFault("GET", "pods", 403))
    async with serve_and_connect(api, last_request) as server:
        last_request._ended_at -= 100
        with pytest.raises(ApiError):
            await server.call("GET", collection_path("Pod", None))
    assert last_request.seconds_since_request() < 5
