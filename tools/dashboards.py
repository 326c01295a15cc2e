"""Describes the Grafana dashboards of the chart and renders them as JSON (classic model, schemaVersion 39)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Json = dict[str, Any]
GRID_WIDTH = 24
SCHEMA_VERSION = 39
PANELS_PLACEHOLDER = "PANELS"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
FLEET = '{namespace=~"$namespace"}'
JOB = '{namespace=~"$namespace",name=~"$name"}'


class PanelKind(StrEnum):
    """Panel plugin of Grafana."""

    STAT = "stat"
    TIME_SERIES = "timeseries"
    BAR_GAUGE = "bargauge"
    TABLE = "table"


@dataclass(frozen=True)
class Query:
    """A PromQL expression with the name of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard; `width` is in 24ths of the dashboard."""

    title: str
    kind: PanelKind
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 12
    description: str = ""
    shows_name: bool = False  # the name of the series instead of its value

    @property
    def height(self) -> int:
        """Height in grid units."""
        return 4 if self.kind is PanelKind.STAT else 8


@dataclass(frozen=True)
class Dashboard:
    """A dashboard with variables for data source and namespace, and for the job if `has_job` is set."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    has_job: bool = False


def _stat(title: str, expr: str, *, unit: str = "short", description: str = "") -> Panel:
    return Panel(title, PanelKind.STAT, (Query(expr),), unit, width=4, description=description)


def _series(title: str, expr: str, legend: str, *, unit: str = "short", description: str = "") -> Panel:
    return Panel(title, PanelKind.TIME_SERIES, (Query(expr, legend),), unit, description=description)


def _bars(title: str, expr: str, legend: str, *, description: str = "") -> Panel:
    return Panel(title, PanelKind.BAR_GAUGE, (Query(expr, legend),), "h", description=description)


def _table(title: str, *queries: Query, unit: str = "short") -> Panel:
    return Panel(title, PanelKind.TABLE, queries, unit, width=GRID_WIDTH)


_LAST_VALUE = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_LEGEND = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
_OPTIONS: dict[PanelKind, Json] = {
    PanelKind.STAT: {
        "graphMode": "none",
        "colorMode": "value",
        "justifyMode": "auto",
        "textMode": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
        "reduceOptions": _LAST_VALUE,
        "orientation": "auto",
    },
    PanelKind.TIME_SERIES: {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    PanelKind.BAR_GAUGE: {
        "displayMode": "basic",
        "valueMode": "text",
        "namePlacement": "left",
        "showUnfilled": True,
        "sizing": "auto",
        "minVizWidth": 8,
        "minVizHeight": 16,
        "maxVizHeight": 300,
        "legend": {**_LEGEND, "showLegend": False},
        "reduceOptions": _LAST_VALUE,
        "orientation": "horizontal",
    },
    PanelKind.TABLE: {"frameIndex": 0, "showHeader": True},
}

PHASES = "useful: steps that count in the result; lost: repeated steps, failures until their detection, failed jobs"
FLEET_DASHBOARD = Dashboard(
    uid="finetune-fleet",
    title="Fine-tuning / Fleet",
    panels=(
        _stat("Running jobs", f'sum(finetune_job_phase{FLEET[:-1]},phase="Running"}}) or vector(0)'),
        _stat("Queued jobs", f'sum(finetune_job_phase{FLEET[:-1]},phase="Queued"}}) or vector(0)'),
        _stat("GPUs in use", f"sum(finetune_job_gpus_allocated{FLEET})"),
        _stat(
            "Useful GPU time",
            f'sum(finetune_job_gpu_seconds{FLEET[:-1]},phase="useful"}}) / sum(finetune_job_gpu_seconds{FLEET})',
            unit="percentunit",
            description="Of the exported jobs since their start.",
        ),
        _stat("Restarts in 24 h", f"sum(increase(finetune_job_restarts_total{FLEET}[24h])) or vector(0)"),
        _stat("Leaders", "sum(finetune_leader)", description="1 in a healthy installation."),
        _series("Jobs by phase", f"sum by (phase) (finetune_job_phase{FLEET})", "{{phase}}"),
        _series("GPUs by namespace", f"sum by (namespace) (finetune_job_gpus_allocated{FLEET})", "{{namespace}}"),
        _bars(
            "GPU hours by phase",
            f"sum by (phase) (finetune_job_gpu_seconds{FLEET}) / 3600",
            "{{phase}}",
            description=PHASES,
        ),
        _bars(
            "GPU hours that failures cost",
            f'sum by (fault, phase) (finetune_job_gpu_seconds{FLEET[:-1]},fault!=""}}) / 3600',
            "{{fault}} {{phase}}",
            description="Lost steps, and the start of the attempts that followed, by the fault of the failure.",
        ),
        _series(
            "GPUs by use, mean of one hour",
            f"sum by (phase) (delta(finetune_job_gpu_seconds{FLEET}[1h])) / 3600",
            "{{phase}}",
            description="Negative for useful while a failure turns earlier steps into lost ones.",
        ),
        _series(
            "Restarts per hour", f"sum by (reason) (increase(finetune_job_restarts_total{FLEET}[1h]))", "{{reason}}"
        ),
        _table(
            "Waiting jobs", Query(f"time() - finetune_job_waiting_since_timestamp_seconds{FLEET}", "waiting"), unit="s"
        ),
        _table("Conditions", Query(f"finetune_job_condition{FLEET}")),
        _series(
            "Duration of passes",
            "histogram_quantile(0.99, sum by (le) (rate(finetune_reconcile_seconds_bucket[5m])))",
            "p99",
            unit="s",
        ),
        _series("Wait in the work queue", "max(finetune_queue_oldest_seconds)", "oldest", unit="s"),
        _series("API requests", "sum by (code) (rate(finetune_api_requests_total[5m]))", "{{code}}", unit="reqps"),
        _series("Event loop delay", "max by (instance) (finetune_event_loop_lag_seconds)", "{{instance}}", unit="s"),
    ),
)
JOB_DASHBOARD = Dashboard(
    uid="finetune-job",
    title="Fine-tuning / Job",
    has_job=True,
    panels=(
        Panel("Phase", PanelKind.STAT, (Query(f"finetune_job_phase{JOB}", "{{phase}}"),), width=4, shows_name=True),
        _stat("Progress", f"finetune_job_progress_ratio{JOB}", unit="percentunit"),
        _stat("Time left", f"finetune_job_eta_seconds{JOB}", unit="s"),
        _stat("GPUs in use", f"finetune_job_gpus_allocated{JOB}"),
        _stat("Restarts", f"finetune_job_failed_attempts{JOB}"),
        _stat("Last report", f"time() - finetune_job_progress_timestamp_seconds{JOB}", unit="s"),
        _series("Loss", f"finetune_job_loss{JOB}", "{{name}}"),
        _series("Tokens per second", f"finetune_job_tokens_per_second{JOB}", "{{name}}"),
        _bars(
            "GPU hours by phase",
            f"sum by (phase) (finetune_job_gpu_seconds{JOB}) / 3600",
            "{{phase}}",
            description=PHASES,
        ),
        _bars(
            "GPU hours that failures cost",
            f'sum by (fault, phase) (finetune_job_gpu_seconds{JOB[:-1]},fault!=""}}) / 3600',
            "{{fault}} {{phase}}",
        ),
        _series("Progress over time", f"finetune_job_progress_ratio{JOB}", "{{name}}", unit="percentunit"),
        _series("Nodes", f"finetune_job_nodes{JOB}", "{{name}}"),
        _table("Waiting for", Query(f"time() - finetune_job_waiting_since_timestamp_seconds{JOB}"), unit="s"),
        _table("Conditions", Query(f"finetune_job_condition{JOB}")),
        _table("Properties", Query(f"finetune_job_info{JOB}")),
    ),
)
DASHBOARDS = {"fleet": FLEET_DASHBOARD, "job": JOB_DASHBOARD}


def render_dashboard(dashboard: Dashboard) -> str:
    """Return the JSON file of a dashboard."""
    body = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": "Generated from tools/dashboards.py by `make generate`.",
        "tags": ["finetune-operator"],
        "timezone": "browser",
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": list(_list_variables(dashboard))},
        "panels": PANELS_PLACEHOLDER,
    }
    panels = ",\n  ".join(json.dumps(panel) for panel in _arrange(dashboard.panels))  # one line each
    return json.dumps(body, indent=1).replace(json.dumps(PANELS_PLACEHOLDER), f"[\n  {panels}\n ]") + "\n"


def _list_variables(dashboard: Dashboard) -> Iterator[Json]:
    yield {"name": "datasource", "type": "datasource", "label": "Data source", "query": "prometheus"}
    yield _build_variable("namespace", "Namespace", "label_values(finetune_job_info, namespace)", is_multiple=True)
    if dashboard.has_job:
        query = 'label_values(finetune_job_info{namespace=~"$namespace"}, name)'
        yield _build_variable("name", "Job", query, is_multiple=False)


def _build_variable(name: str, label: str, query: str, *, is_multiple: bool) -> Json:
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": DATASOURCE,
        "query": query,
        "refresh": 2,  # on each change of the time range
        "sort": 1,
        "multi": is_multiple,
        "includeAll": is_multiple,
    }


def _arrange(panels: tuple[Panel, ...]) -> Iterator[Json]:
    """Yield the panels from left to right; a panel that does not fit into the row begins the next one."""
    x = y = row_height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > GRID_WIDTH:
            x, y, row_height = 0, y + row_height, 0
        position = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        yield _build_panel(panel, number, position)
        x, row_height = x + panel.width, max(row_height, panel.height)


def _build_panel(panel: Panel, number: int, position: Json) -> Json:
    is_range = panel.kind is PanelKind.TIME_SERIES
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "instant": not is_range,
            "range": is_range,
            "format": "table" if panel.kind is PanelKind.TABLE else "time_series",
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "gridPos": position,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {**_OPTIONS[panel.kind], **({"textMode": "name"} if panel.shows_name else {})},
    }
