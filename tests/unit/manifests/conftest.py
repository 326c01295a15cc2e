"""Programs that check the manifests; tests that need one are skipped with the reason why it cannot be built."""

from pathlib import Path

import pytest

from helm import find_helm
from prometheus import DASHBOARD_CHECK, PROMETHEUS, build_program
from testing.cluster.host.commands import HarnessError
from testing.cluster.images.go_build import Component


@pytest.fixture(scope="session")
def helm() -> Path:
    program = find_helm()
    if program is None:
        pytest.skip("neither helm nor Go to build it is installed")
    return program


def _require_program(component: Component, program: str) -> Path:
    try:
        return build_program(component, program)
    except HarnessError as error:
        pytest.skip(f"{program} cannot be built: {error}")


@pytest.fixture(scope="session")
def promtool() -> Path:
    return _require_program(PROMETHEUS, "promtool")


@pytest.fixture(scope="session")
def prometheus_program() -> Path:
    return _require_program(PROMETHEUS, "prometheus")


@pytest.fixture(scope="session")
def dashboard_check() -> Path:
    return _require_program(DASHBOARD_CHECK, "dashboard-check")
