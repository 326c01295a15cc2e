"""Builds the programs that check alerts and dashboards with Go: promtool, prometheus and dashboard-check."""

from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError
from testing.cluster.images.go_build import Component, GoInstallComponent, LocalMainComponent, build, is_built

PROMETHEUS_VERSION = "0.316.0"  # 3.16.0
GRAFANA_SDK_VERSION = "0.0.22"
_MODULE = "github.com/prometheus/prometheus"
PROMETHEUS = GoInstallComponent(
    component="prometheus",
    version=PROMETHEUS_VERSION,
    packages=(f"{_MODULE}/cmd/promtool", f"{_MODULE}/cmd/prometheus"),
    tags="netgo,remove_all_sd",  # without the service discoveries of cloud providers, and without the web interface
)
DASHBOARD_CHECK = LocalMainComponent(
    component="dashboard-check",
    version=GRAFANA_SDK_VERSION,
    module="github.com/grafana/grafana-foundation-sdk/go",
    is_pinned=True,
)


def build_program(component: Component, program: str) -> Path:
    """Return the path of a program, built if necessary; the first build of Prometheus takes minutes.

    Raises:
        HarnessError: Go is missing or too old, or the build failed.
    """
    cache = Cache.from_environment()
    if not is_built(cache, component):
        with cache.hold_lock("build"):
            build(cache, component)
    return cache.get_binary_folder(component.component, component.version) / program


def prepare_programs() -> None:
    """Build all programs before the tests, whose timeout is shorter; tests are skipped if a build fails."""
    for component in (PROMETHEUS, DASHBOARD_CHECK):
        try:
            build_program(component, component.programs[0])
        except HarnessError as error:
            print(f"no {component.component}: {error}", flush=True)
