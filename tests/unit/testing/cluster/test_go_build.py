"""Tests of building components from Go modules."""

from pathlib import Path

import pytest

from testing.cluster.host.cache import Cache
from testing.cluster.host.versions import PINNED
from testing.cluster.images.go_build import SOURCES, LocalMainComponent, list_components, render_go_mod

OWN_MAINS = [component for component in list_components(PINNED).values() if isinstance(component, LocalMainComponent)]


@pytest.mark.parametrize("component", OWN_MAINS, ids=lambda component: component.component)
def test_committed_go_mod_matches_the_pinned_version(component: LocalMainComponent) -> None:
    """Fails if `python -m testing.cluster pin` was not run after a change of versions.py."""
    pinned = (SOURCES / component.component / "go.mod").read_text()

    expected_lines = [
        line.strip() for line in render_go_mod(component).splitlines() if "k8s.io/" in line or "require" in line
    ]
    lines = {line.strip().removeprefix("require ") for line in pinned.splitlines()}
    assert all(line.removeprefix("require ").strip() in lines for line in expected_lines if "(" not in line)


def test_go_flags_do_not_disable_the_verification_of_modules(tmp_path: Path) -> None:
    environment = Cache(tmp_path).go_environment

    assert environment["GOFLAGS"].split() == ["-modcacherw", "-buildvcs=false"]
    assert environment.keys().isdisjoint({"GOSUMDB", "GONOSUMDB", "GONOSUMCHECK", "GOPRIVATE", "GOINSECURE"})


def test_pinned_go_modules_have_checksums() -> None:
    components = [component for component in OWN_MAINS if component.module]

    assert {component.component for component in components} == {"kubernetes", "etcd", "coredns"}
    for component in components:
        required = f"{component.module} v{component.version}"
        lines = (SOURCES / component.component / "go.sum").read_text().splitlines()
        assert [line for line in lines if line.startswith(f"{required} h1:")] != [], required
