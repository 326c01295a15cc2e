"""Tests of the files of a release."""

import hashlib
import io
import json
import subprocess
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from go_programs import find_program
from helm import find_helm, list_images, render_chart
from lockfile import read_locks
from release import (
    BILLS_OF_MATERIALS,
    PLUGIN,
    ReleaseContent,
    build_archive,
    find_version_problems,
    replace_once,
    write_bills_of_materials,
    write_chart,
    write_checksums,
    write_kubectl_plugin,
)
from testing.cluster.host.versions import KREW

OPERATOR, TRAINER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
PINNED = [f"ghcr.io/finetune-operator/operator@{OPERATOR}", f"ghcr.io/finetune-operator/trainer@{TRAINER}"]
RELEASE = ReleaseContent("0.1.0", OPERATOR, TRAINER, datetime(2026, 11, 27, tzinfo=UTC))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all files of a release."""
    helm = find_helm()
    if helm is None:
        pytest.skip("neither helm nor Go to build it is installed")
    folder = tmp_path_factory.mktemp("release")
    write_chart(RELEASE, helm, folder)
    write_bills_of_materials(RELEASE, folder)
    write_kubectl_plugin(RELEASE, folder)
    write_checksums(folder)
    return folder


def test_released_chart_and_manifests_contain_images_by_digest_only(files: Path) -> None:
    helm = find_helm()
    assert helm is not None
    rendered = yaml.safe_load_all(render_chart(helm, chart=files / "finetune-operator-0.1.0.tgz"))

    assert list_images(rendered) == PINNED
    assert (files / "images.txt").read_text().split() == PINNED
    assert list_images(yaml.safe_load_all((files / "install.yaml").read_text())) == PINNED


def test_annotation_of_the_released_chart_contains_the_same_images(files: Path) -> None:
    with tarfile.open(files / "finetune-operator-0.1.0.tgz") as archive:
        member = archive.extractfile("finetune-operator/Chart.yaml")
        assert member is not None
        annotations = yaml.safe_load(member.read())["annotations"]

    assert [entry["image"] for entry in yaml.safe_load(annotations["artifacthub.io/images"])] == PINNED


@pytest.mark.parametrize(("name", "locks"), BILLS_OF_MATERIALS.items())
def test_bill_of_materials_contains_each_locked_package_with_its_hashes(
    name: str, locks: tuple[str, ...], files: Path
) -> None:
    components = json.loads((files / f"{name}.cdx.json").read_text())["components"]
    found = {
        (component["purl"], *sorted(value["content"] for value in component["externalReferences"][0]["hashes"]))
        for component in components
    }

    packages = read_locks(locks)
    assert found == {(f"pkg:pypi/{each.name}@{each.version}", *sorted(each.hashes)) for each in packages}
    assert len(components) == len(packages) > 20


def test_manifest_of_the_kubectl_plugin_is_valid_and_contains_the_sha256_of_its_archive(files: Path) -> None:
    manifest = (files / "finetune.yaml").read_text()
    (platform,) = yaml.safe_load(manifest)["spec"]["platforms"]

    assert platform["sha256"] == hashlib.sha256((files / PLUGIN).read_bytes()).hexdigest()
    assert platform["uri"].endswith(f"/v0.1.0/{PLUGIN}")
    assert "@" not in manifest
    program = find_program("validate-krew-manifest", KREW)
    if program is None:
        pytest.skip("neither validate-krew-manifest nor Go to build it is installed")
    assert subprocess.run([program, "-manifest", files / "finetune.yaml", "-skip-install"], check=False).returncode == 0


def test_archive_of_the_kubectl_plugin_contains_program_packages_and_wheel(files: Path) -> None:
    with tarfile.open(files / PLUGIN) as archive:
        modes = {member.name: member.mode for member in archive.getmembers()}
        script = archive.extractfile("kubectl-finetune")
        assert script is not None
        text = script.read().decode()

    wheel = "finetune_operator-0.1.0-py3-none-any.whl"
    assert modes == {"kubectl-finetune": 0o755, "cli.txt": 0o644, wheel: 0o644, "LICENSE": 0o644}
    assert "kubectl-finetune/0.1.0" in text
    assert "@VERSION@" not in text


def test_archive_depends_on_content_and_commit_time_only() -> None:
    first, second = (build_archive({"a": b"x"}, RELEASE.created_at) for _ in range(2))

    assert first == second
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        assert archive.getmember("a").mtime == RELEASE.created_at.timestamp()


def test_checksums_cover_all_files(files: Path) -> None:
    lines = [line.split("  ") for line in (files / "SHA256SUMS").read_text().splitlines()]

    assert {name for _, name in lines} == {path.name for path in files.iterdir()} - {"SHA256SUMS"}
    assert [name for value, name in lines if hashlib.sha256((files / name).read_bytes()).hexdigest() != value] == []


def test_all_files_with_a_version_agree() -> None:
    assert list(find_version_problems("v0.1.0")) == []
    assert len(list(find_version_problems("v9.9.9"))) == 4


def test_text_that_does_not_occur_once_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("a a")

    with pytest.raises(ValueError, match=r"values\.yaml: 'a' occurs 2 times; expected once"):
        replace_once(path, {"a": "b"})
    assert path.read_text() == "a a"
