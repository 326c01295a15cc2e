"""What is built, from which modules."""

from dataclasses import replace

import pytest

from testing.cluster.host.versions import PINNED, staging_modules
from testing.cluster.images.go_build import KUBERNETES_PROGRAMS, SOURCES, OwnMain, components, render_go_mod

OWN_MAINS = [component for component in components(PINNED).values() if isinstance(component, OwnMain)]


def kubernetes(version: str) -> OwnMain:
    component = components(replace(PINNED, kubernetes=version))["kubernetes"]
    assert isinstance(component, OwnMain)
    return component


@pytest.mark.parametrize(
    ("version", "count"),
    [pytest.param("1.35.4", 31, id="before the split"), pytest.param("1.36.3", 33, id="with streaming apart")],
)
def test_every_staging_module_has_a_replace_line_of_its_version(version: str, count: int) -> None:
    text = render_go_mod(kubernetes(version))

    replaced = [line for line in text.splitlines() if "=>" in line]
    assert len(replaced) == len(staging_modules(version)) == count
    assert all(line.endswith(f" v0.{version.removeprefix('1.')}") for line in replaced)


@pytest.mark.parametrize("component", OWN_MAINS, ids=lambda component: component.component)
def test_the_pinned_go_mod_was_made_from_this_version(component: OwnMain) -> None:
    """Otherwise `python -m testing.cluster pin` was forgotten after a change of versions.py."""
    pinned = (SOURCES / component.component / "go.mod").read_text()

    wanted = [line.strip() for line in render_go_mod(component).splitlines() if "k8s.io/" in line or "require" in line]
    lines = {line.strip().removeprefix("require ") for line in pinned.splitlines()}
    assert all(line.removeprefix("require ").strip() in lines for line in wanted if "(" not in line)


def test_another_version_is_not_taken_from_the_pinned_go_mod() -> None:
    assert kubernetes(PINNED.kubernetes).pinned
    assert not kubernetes("1.35.4").pinned


def test_the_version_is_stamped_where_kubectl_and_helm_look() -> None:
    flags = kubernetes("1.35.4").linker_flags

    assert "-X k8s.io/component-base/version.gitVersion=v1.35.4" in flags
    assert "-X k8s.io/client-go/pkg/version.gitMinor=35" in flags


@pytest.mark.parametrize("version", ["1.36", "v1.36.3", "2.0.0", "1.x.3", "1.20.0"])
def test_a_version_that_cannot_be_built_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match="version"):
        kubernetes(version)


def test_the_one_binary_answers_to_every_program_that_the_cluster_starts() -> None:
    source = (SOURCES / "kubernetes" / "main.go").read_text()

    assert len(KUBERNETES_PROGRAMS) == 6
    assert all(f'"{program}":' in source for program in KUBERNETES_PROGRAMS)
