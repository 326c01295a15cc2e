"""Tests of the Grafana dashboards: their schema, and their queries on metrics that the operator exports."""

import asyncio
import json
import socket
import subprocess
from asyncio.subprocess import PIPE
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from dashboards import DASHBOARDS, GRID_WIDTH, render_dashboard
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.credentials import ClusterCredentials
from finetune_operator.manager.health import start_http_server
from finetune_operator.manager.manager import Connections, Manager, OperatorOptions
from finetune_operator.metrics import Metrics
from helm import CHART, find_helm, render_chart
from testing.builders.fleet import build_fleet
from testing.builders.jobs import SETTINGS
from testing.processes.prometheus_server import run_prometheus

FILES = sorted((CHART / "files" / "dashboards").glob("*.json"))
# values of the variables of the dashboards
VARIABLES = {"$namespace": ".*", "$name": ".*"}


def list_queries() -> list[tuple[str, str]]:
    """Return the title and expression of each query of all dashboards."""
    return [
        (f"{dashboard.title}: {panel.title}", query.expr)
        for dashboard in DASHBOARDS.values()
        for panel in dashboard.panels
        for query in panel.queries
    ]


def build_leader(metrics: Metrics) -> Manager:
    """Return the manager of an operator that leads and has the fleet in its cache, but runs no passes."""
    client: Any = ApiClient("http://unused", request_session=None, watch_session=None)  # type: ignore[arg-type]
    options = OperatorOptions(SETTINGS, leader_election=False)
    manager = Manager(options, Connections(ClusterCredentials(server="http://unused"), metrics, client, client))
    for body in build_fleet(datetime.now(UTC)):
        manager._controller.on_job_event(body)
    manager._controller.start_leading(lambda: True)
    metrics.leader.set(1)
    metrics.reconcile.labels("changed").observe(0.01)
    metrics.requests.labels("update", "finetunejobs/status", "200").inc()
    metrics.restarts.labels("team", "NodeLost", "infrastructure").inc()
    return manager


def test_every_dashboard_file_belongs_to_a_description() -> None:
    assert {path.stem for path in FILES} == set(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_neither_overlap_nor_exceed_the_grid(name: str) -> None:
    positions = [panel["gridPos"] for panel in json.loads(render_dashboard(DASHBOARDS[name]))["panels"]]

    cells = [(x, y) for p in positions for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells)) > 0
    assert max(x for x, _ in cells) < GRID_WIDTH


def check_dashboards(program: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *paths], capture_output=True, text=True, check=False)


def test_dashboards_comply_with_the_schema_of_grafana(dashboard_check: Path, tmp_path: Path) -> None:
    result = check_dashboards(dashboard_check, *FILES)

    assert (result.returncode, result.stderr) == (0, "")
    misspelt = tmp_path / "misspelt.json"
    misspelt.write_text(FILES[0].read_text().replace('"gridPos"', '"gridPosition"'))
    assert "gridPosition" in check_dashboards(dashboard_check, misspelt).stderr


async def test_exported_metrics_are_well_formed(promtool: Path) -> None:
    metrics = Metrics()
    build_leader(metrics)

    process = await asyncio.create_subprocess_exec(promtool, "check", "metrics", stdin=PIPE, stdout=PIPE, stderr=PIPE)
    _, problems = await process.communicate(generate_latest(metrics.registry))

    assert (process.returncode, problems) == (0, b"")


async def test_every_query_of_the_dashboards_returns_data(prometheus_program: Path, tmp_path: Path) -> None:
    """Prometheus scrapes the HTTP server of the operator."""
    metrics = Metrics()
    manager = build_leader(metrics)
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    server = await start_http_server(manager.health, metrics, port=port, host="127.0.0.1")
    try:
        async with run_prometheus(prometheus_program, tmp_path, target=f"127.0.0.1:{port}") as prometheus:
            await prometheus.wait_for_scrapes("finetune_leader")
            results = {title: await prometheus.query(_set_variables(expr)) for title, expr in list_queries()}
    finally:
        await server.cleanup()

    assert len(results) == len(list_queries()) > 30
    assert [title for title, result in results.items() if not result] == []


def _set_variables(expr: str) -> str:
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr.replace(" or vector(0)", "")


def test_dashboards_are_config_maps_that_the_sidecar_of_grafana_finds() -> None:
    helm = find_helm()
    if helm is None:
        pytest.skip("neither helm nor Go to build it is installed")
    settings = ("installCRD=false", 'dashboards={"enabled":true,"namespace":"monitoring"}')

    documents = [d for d in yaml.safe_load_all(render_chart(helm, *settings)) if d and d["kind"] == "ConfigMap"]

    assert {d["metadata"]["name"] for d in documents} == {f"finetune-operator-dashboard-{name}" for name in DASHBOARDS}
    for document in documents:
        assert document["metadata"]["namespace"] == "monitoring"
        assert document["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, content),) = document["data"].items()
        assert content == (CHART / "files" / "dashboards" / name.removeprefix("finetune-")).read_text().strip()
