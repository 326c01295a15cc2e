"""What the operator counts and measures about itself, for Prometheus."""

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

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
NO_ANSWER = "none"


class Metrics:
    """One registry, so that tests and several operators in one process do not share numbers."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double every series
        self.registry = CollectorRegistry()
        registry = self.registry
        ProcessCollector(registry=registry)
        self.queue_wait = Histogram(
            "finetune_queue_wait_seconds", "Time jobs waited for a pass.", buckets=SHORT, registry=registry
        )
        self.reconcile = Histogram(
            "finetune_reconcile_seconds", "Duration of passes.", ["result"], buckets=SHORT, registry=registry
        )
        self.requests = Counter(
            "finetune_api_requests",
            "Requests to the API server; code none is no answer.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.restarts = Counter(
            "finetune_job_restarts", "Restarts of jobs after a failure.", ["reason", "fault"], registry=registry
        )
        self.leader = Gauge("finetune_leader", "1 while this replica acts.", registry=registry)
        self.loop_lag = Gauge("finetune_event_loop_lag_seconds", "Worst delay of the last minute.", registry=registry)

    def scrape(self, name: str, description: str, *, label: str = "", read: Callable[[], Mapping[str, float]]) -> None:
        """Add a gauge that is read when Prometheus asks; without `label` the one value is under ''."""
        self.registry.register(_Scraped(name, description, label, read))


class _Scraped(Collector):
    def __init__(self, name: str, description: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._name, self._description, self._label, self._read = name, description, label, read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._description, labels=[self._label] if self._label else None)
        for value, number in self._read().items():
            family.add_metric([value] if self._label else [], number)
        yield family

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Registering must not read values that are not there yet."""
        return (GaugeMetricFamily(self._name, self._description),)


class CountRequests:
    """Middleware of a client session: counts every answer, and every lack of one."""

    def __init__(self, requests: Counter) -> None:
        self._requests = requests

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Pass the request on and count how it ended."""
        verb, resource = describe_request(request.method, request.url.path, watches="watch" in request.url.query)
        code = NO_ANSWER
        try:
            response = await handler(request)
            code = str(response.status)
            return response
        finally:
            self._requests.labels(verb, resource, code).inc()


def describe_request(method: str, path: str, *, watches: bool = False) -> tuple[str, str]:
    """Verb and resource as RBAC calls them, so that the labels stay few: no names, no namespaces."""
    parts = [part for part in path.split("/") if part]
    skipped = {"api": 2, "apis": 3}.get(parts[0] if parts else "", 0)  # api/v1, apis/<group>/<version>
    rest = parts[skipped:] if skipped else []
    if len(rest) > 2 and rest[0] == "namespaces":
        rest = rest[2:]
    if not rest:
        return method.lower(), "discovery"
    resource = rest[0] if len(rest) < 3 else f"{rest[0]}/{rest[2]}"
    named = len(rest) > 1
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    if method != "GET":
        return verbs.get(method, method.lower()), resource
    return ("watch" if watches else "get" if named else "list"), resource
