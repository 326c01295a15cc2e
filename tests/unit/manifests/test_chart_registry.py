"""Tests of the packaged chart in an OCI registry, and of its metadata for Artifact Hub."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from crd import build_crd
from finetune_api.v1alpha1.job import FineTuneJob
from go_programs import find_program
from helm import CHART, render_chart
from testing.cluster.host.versions import REGISTRY

CHART_FILE = yaml.safe_load((CHART / "Chart.yaml").read_text())


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    """Return the reference of an empty OCI registry."""
    program = find_program("registry", REGISTRY)
    if program is None:
        pytest.skip("neither the registry nor Go to build it is installed")
    with subprocess.Popen([program, "-port", "0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = re.search(r"serving on port (\d+)", process.stderr.readline())
        assert port is not None
        try:
            yield f"oci://localhost:{port.group(1)}/charts"
        finally:
            process.terminate()


def test_chart_can_be_pulled_and_rendered_from_an_oci_registry(helm: Path, registry: str, tmp_path: Path) -> None:
    version, name = CHART_FILE["version"], CHART_FILE["name"]
    subprocess.run([helm, "package", CHART, "--destination", tmp_path], check=True, stdout=subprocess.DEVNULL)
    archive = tmp_path / f"{name}-{version}.tgz"
    subprocess.run([helm, "push", archive, registry, "--plain-http"], check=True)

    pulled = tmp_path / "pulled"
    options = ("--plain-http", "--version", version, "--untar", "--untardir", pulled)
    subprocess.run([helm, "pull", f"{registry}/{name}", *options], check=True)
    command = [helm, "template", name, f"{registry}/{name}", "--version", version, "--plain-http"]
    rendered = subprocess.run(
        [*command, "--namespace", "finetune-system"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout

    expected = render_chart(helm)
    assert expected.count("kind: ") > 10
    assert rendered[rendered.index("---\n") :] == expected  # behind the digest
    assert render_chart(helm, chart=pulled / name) == expected


def test_packaged_chart_contains_no_other_files(helm: Path, tmp_path: Path) -> None:
    subprocess.run([helm, "package", CHART, "--destination", tmp_path], check=True, stdout=subprocess.DEVNULL)
    (archive,) = tmp_path.glob("*.tgz")
    listed = subprocess.run(["tar", "-tf", archive], check=True, stdout=subprocess.PIPE, text=True).stdout.split()

    tracked = {path for path in CHART.rglob("*") if path.is_file() and path.parent.name != "__pycache__"}
    assert set(listed) == {str(path.relative_to(CHART.parent)) for path in tracked}


def test_crds_of_the_annotation_are_those_of_the_chart() -> None:
    (annotated,) = yaml.safe_load(CHART_FILE["annotations"]["artifacthub.io/crds"])
    crd = build_crd()

    assert annotated["name"] == crd["metadata"]["name"]
    assert (annotated["kind"], annotated["version"]) == (
        crd["spec"]["names"]["kind"],
        crd["spec"]["versions"][0]["name"],
    )


def test_example_of_the_annotation_is_a_valid_job() -> None:
    (example,) = yaml.safe_load(CHART_FILE["annotations"]["artifacthub.io/crdsExamples"])

    assert FineTuneJob.parse(example).spec.num_nodes == 2
