"""Prometheus metrics of the operator: queue, passes, API requests, restarts, leadership, event loop."""

from collections.abc import Callable, Iterable, Mapping

import aiohttp
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
NO_RESPONSE = "none"


class Metrics:
    """Metrics in a separate registry, so that several operators in one process do not share values."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the number of series
        self.registry = CollectorRegistry()
        registry = self.registry
        ProcessCollector(registry=registry)
        self.queue_wait = Histogram(
            "finetune_queue_wait_seconds", "Time jobs waited for a pass.", buckets=BUCKETS_SECONDS, registry=registry
        )
        self.reconcile = Histogram(
            "finetune_reconcile_seconds", "Duration of passes.", ["result"], buckets=BUCKETS_SECONDS, registry=registry
        )
        self.requests = Counter(
            "finetune_api_requests",
            "Requests to the API server; code none is no answer.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.restarts = Counter(
            "finetune_job_restarts",
            "Restarts of jobs after a failure.",
            ["namespace", "reason", "fault"],
            registry=registry,
        )
        self.notifications = Counter(
            "finetune_notifications",
            "Notifications: delivered, rejected by the sink, expired, or dropped because the queue was full.",
            ["result"],
            registry=registry,
        )
        self.loop_errors = Counter(
            "finetune_loop_errors", "Unexpected errors of background loops.", ["loop"], registry=registry
        )
        self.leader = Gauge("finetune_leader", "1 while this replica acts.", registry=registry)
        self.loop_lag = Gauge("finetune_event_loop_lag_seconds", "Worst delay of the last minute.", registry=registry)

    def register_gauge(
        self, name: str, description: str, *, label: str = "", read_values: Callable[[], Mapping[str, float]]
    ) -> None:
        """Register a gauge whose values are read at each scrape; without `label`, the only key is ''."""
        self.registry.register(_ScrapedGauge(name, description, label, read_values))


class _ScrapedGauge(Collector):
    def __init__(self, name: str, description: str, label: str, read_values: Callable[[], Mapping[str, float]]) -> None:
        self._name, self._description, self._label, self._read_values = name, description, label, read_values

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._description, labels=[self._label] if self._label else None)
        for label_value, sample in self._read_values().items():
            family.add_metric([label_value] if self._label else [], sample)
        yield family

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the metric family without samples, so that registration reads no values."""
        return (GaugeMetricFamily(self._name, self._description),)


class RequestCounter:
    """Middleware of an aiohttp client session that counts requests by verb, resource and status code."""

    def __init__(self, request_counter: Counter) -> None:
        self._request_counter = request_counter

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send the request and count it, even if no response arrives."""
        verb, resource = describe_request(request.method, request.url.path, is_watch="watch" in request.url.query)
        code = NO_RESPONSE
        try:
            response = await handler(request)
            code = str(response.status)
            return response
        finally:
            self._request_counter.labels(verb, resource, code).inc()


def describe_request(method: str, path: str, *, is_watch: bool = False) -> tuple[str, str]:
    """Return RBAC verb and resource of a request, without object names to limit the number of label values."""
    segments = [segment for segment in path.split("/") if segment]
    # a path starts with api/v1 or apis/<group>/<version>
    prefix_length = {"api": 2, "apis": 3}.get(segments[0] if segments else "", 0)
    resource_segments = segments[prefix_length:] if prefix_length else []
    if len(resource_segments) > 2 and resource_segments[0] == "namespaces":
        resource_segments = resource_segments[2:]
    if not resource_segments:
        return method.lower(), "discovery"
    resource = resource_segments[0] if len(resource_segments) < 3 else f"{resource_segments[0]}/{resource_segments[2]}"
    has_name = len(resource_segments) > 1
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    if method != "GET":
        return verbs.get(method, method.lower()), resource
    return ("watch" if is_watch else "get" if has_name else "list"), resource
