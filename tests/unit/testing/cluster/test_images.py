"""Tests of image archives and image build inputs."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError
from testing.cluster.images.apt_settings import render_apt_settings, select_mirrors
from testing.cluster.images.oci import keep_newest_image_uncompressed, stream_missing, write_single_layer_image
from testing.cluster.images.project_images import (
    BUILD_FILES,
    CODE,
    LOCKS,
    REPOSITORY,
    ImageBuilder,
    build_docker_arguments,
    list_source_files,
    render_pip_settings,
)
from testing.cuda_image import build


def list_member_names(archive: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {member.name for member in opened}


def list_streamed_names(image: Path, *, present_digests: set[str]) -> set[str]:
    target = io.BytesIO()
    stream_missing(image, target, present_digests=present_digests)
    return list_member_names(target.getvalue())


def write_small_image(folder: Path) -> Path:
    archive = folder / "small.tar"
    write_single_layer_image(archive, name="localhost/small:1", files={"run": b"program"}, entrypoint=("/run",))
    return archive


def test_blobs_of_a_single_layer_image_are_named_by_their_digest(tmp_path: Path) -> None:
    archive = write_small_image(tmp_path)

    with tarfile.open(archive) as opened:
        blobs = [m for m in opened if m.name.startswith("blobs/sha256/")]
        assert len(blobs) == 3
        for member in blobs:
            file = opened.extractfile(member)
            assert file is not None
            assert hashlib.sha256(file.read()).hexdigest() == member.name.rpartition("/")[2]
        index = opened.extractfile("index.json")
        assert index is not None
        assert json.load(index)["manifests"][0]["annotations"]["io.containerd.image.name"] == "localhost/small:1"


def test_single_layer_images_are_reproducible(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    assert write_small_image(tmp_path / "a").read_bytes() == write_small_image(tmp_path / "b").read_bytes()


def test_blobs_present_on_the_node_are_not_streamed(tmp_path: Path) -> None:
    archive = write_small_image(tmp_path)
    all_names = list_streamed_names(archive, present_digests=set())
    blob = next(name for name in sorted(all_names) if name.startswith("blobs/"))

    sent_names = list_streamed_names(archive, present_digests={"sha256:" + blob.rpartition("/")[2]})

    assert all_names - sent_names == {blob}
    assert {"oci-layout", "index.json"} <= sent_names


def test_unpacked_layout_and_archive_are_streamed_identically(tmp_path: Path) -> None:
    archive = write_small_image(tmp_path)
    layout = tmp_path / "layout"
    with tarfile.open(archive) as opened:
        opened.extractall(layout, filter="data")

    assert list_streamed_names(layout, present_digests=set()) == list_streamed_names(archive, present_digests=set())


def add_blob(layout: Path, content: bytes) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    folder = layout / "blobs" / "sha256"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def add_image(layout: Path, layer: bytes) -> dict[str, object]:
    compressed = add_blob(layout, gzip.compress(layer)) | {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}
    manifest = {"config": add_blob(layout, b"{}" + layer), "layers": [compressed]}
    return add_blob(layout, json.dumps(manifest).encode())


def test_layout_keeps_only_newest_image_with_uncompressed_layers(tmp_path: Path) -> None:
    images = [add_image(tmp_path, layer) for layer in (b"old layer", b"new layer")]
    (tmp_path / "index.json").write_text(json.dumps({"manifests": images}))

    keep_newest_image_uncompressed(tmp_path)

    (entry,) = json.loads((tmp_path / "index.json").read_text())["manifests"]
    blobs = {path.name: path.read_bytes() for path in (tmp_path / "blobs" / "sha256").iterdir()}
    manifest = json.loads(blobs[entry["digest"].removeprefix("sha256:")])
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar"
    assert blobs[layer["digest"].removeprefix("sha256:")] == b"new layer"
    assert layer["size"] == len(b"new layer")
    assert len(blobs) == 3
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in blobs.items())


def write_repository(folder: Path) -> Path:
    (folder / "requirements").mkdir(parents=True)
    for name in (*BUILD_FILES, *(lock for locks in LOCKS.values() for lock in locks)):
        (folder / name).write_text(name)
    for code in {code for codes in CODE.values() for code in codes}:
        (folder / code).mkdir(parents=True, exist_ok=True)
        (folder / code / "module.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    ("changed_path", "rebuilt_targets"),
    [
        pytest.param("operator/finetune_operator/module.py", {"operator"}, id="operator"),
        pytest.param("trainer/finetune_trainer/module.py", {"trainer"}, id="trainer"),
        pytest.param("trainer/finetune_supervisor/module.py", {"operator", "trainer"}, id="supervisor"),
        pytest.param("operator/finetune_api/module.py", {"operator", "trainer"}, id="api"),
        pytest.param("requirements/operator.txt", {"operator"}, id="lock of the operator"),
        pytest.param("requirements/torch.txt", {"trainer"}, id="lock of torch"),
        pytest.param("requirements/hatchling.txt", {"operator", "trainer"}, id="lock of the build backend"),
    ],
)
def test_content_key_changes_only_with_source_files_of_the_image(
    tmp_path: Path, changed_path: str, rebuilt_targets: set[str]
) -> None:
    source = write_repository(tmp_path)
    builder = ImageBuilder(Cache(tmp_path / "cache"), repository=source)
    previous_keys = {target: builder.compute_content_key(target) for target in CODE}

    (source / changed_path).write_text("changed")

    assert {
        target for target in CODE if builder.compute_content_key(target) != previous_keys[target]
    } == rebuilt_targets


def test_source_files_of_this_repository_are_found() -> None:
    for target in CODE:
        names = [str(path.relative_to(REPOSITORY)) for path in list_source_files(REPOSITORY, target)]
        assert {"Dockerfile", f"requirements/{target}.txt", "operator/finetune_api/v1alpha1/job.py"} <= {*names}
        assert not [name for name in names if "__pycache__" in name]


def test_pip_settings_contain_certificates_and_wheel_folders() -> None:
    text = render_pip_settings({"index-url": "https://index.example"}, find_links=("http://127.0.0.1:1/",))

    assert text.splitlines() == [
        "[global]",
        "cert = /run/secrets/certificates",
        "index-url = https://index.example",
        "find-links =",
        "    http://127.0.0.1:1/",
    ]


def test_every_installation_of_the_dockerfile_verifies_hashes() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", "").replace("&&", "\n")
    commands = [line for line in dockerfile.splitlines() if "pip install" in line and not line.startswith("#")]
    unverified = [command for command in commands if "--require-hashes" not in command]

    assert len(commands) == 5
    # only the project itself, from the build context, with a build backend that was verified
    assert [command.partition("pip")[2].split() for command in unverified] == [
        ["install", "--no-deps", "--no-build-isolation", "--target", "/code", "."]
    ]


def test_files_that_the_dockerfile_copies_are_in_the_content_key() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    copied = {word for word in dockerfile.split() if word.startswith("requirements/") and word.endswith(".txt")}

    locks = {lock for locks in LOCKS.values() for lock in locks}
    assert copied - {"requirements/${TORCH}.txt"} == locks - {"requirements/torch.txt", "requirements/torch-cpu.txt"}
    assert [lock for lock in locks if not (REPOSITORY / lock).is_file()] == []


def test_base_image_build_argument_is_set_only_if_the_environment_sets_it() -> None:
    assert build_docker_arguments({}) == ()
    assert build_docker_arguments({"BASE_IMAGE": "x@sha256:1"}) == ("--build-arg", "BASE_IMAGE=x@sha256:1")


APT_DUMP = """APT::Architecture "amd64";
Acquire::http "";
Acquire::http::Proxy "http://proxy.example:3128";
Acquire::https::Proxy::mirror.example "DIRECT";
Acquire::https::CaInfo "/home/me/certificates.pem";
Acquire::Retries "3";
Acquire::Check-Date "false";
Acquire::IndexTargets::deb::Packages::MetaKey "$(COMPONENT)/binary-$(ARCHITECTURE)/Packages";
Dir::Cache "var/cache/apt";
"""


def test_apt_settings_contain_proxies_of_the_host_and_the_certificates_of_the_secret() -> None:
    assert render_apt_settings(APT_DUMP, has_mirrors=True).splitlines() == [
        'Acquire::http::Proxy "http://proxy.example:3128";',
        'Acquire::https::Proxy::mirror.example "DIRECT";',
        'Acquire::Retries "3";',
        'Acquire::Check-Date "false";',
        'Acquire::https::CaInfo "/run/secrets/certificates";',
        'APT::Sandbox::User "root";',
        'Dir::Etc::SourceList "/run/secrets/sources.list";',
        'Dir::Etc::SourceParts "-";',
    ]


def test_apt_of_the_image_keeps_its_sources_without_mirrors_of_the_host() -> None:
    assert "SourceList" not in render_apt_settings("", has_mirrors=False)


def test_mirrors_are_those_of_debian_of_the_same_release() -> None:
    lines = (
        "deb http://mirror.example/debian bookworm main",
        "deb http://mirror.example/debian bookworm main",
        "deb http://mirror.example/debian bookworm-updates main",
        "deb http://mirror.example/debian-security bookworm-security main",
        "deb http://mirror.example/debian bookworm contrib",
        "deb http://mirror.example/debian trixie main",
        "deb http://packages.example/tool nodistro main",
        "",
    )

    selected = select_mirrors("\n".join(lines), suite="bookworm")

    assert selected == (lines[0], lines[2], lines[3])


@pytest.mark.parametrize("torch", ["torch", "torch-cpu", "torch-cuda12"])
def test_dockerfile_has_a_stage_with_debian_packages_for_each_build_of_torch(torch: str) -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    parents = {line.split()[3]: line.split()[1] for line in dockerfile.splitlines() if line.startswith("FROM ")}

    assert parents["trainer-dependencies"] == "system-${TORCH}"
    assert parents[f"system-{torch}"] == ("system-torch" if torch == "torch-cuda12" else "base")


def test_only_the_stage_for_gpus_installs_debian_packages() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    stages = {stage.split("\n", 1)[0].split()[-1]: stage for stage in dockerfile.split("\nFROM ")[1:]}

    assert [name for name, stage in stages.items() if "apt-get install" in stage] == ["system-torch"]
    for package in ("libibverbs1", "ibverbs-providers", "librdmacm1", "libnuma1", "gcc", "libc6-dev"):
        assert f" {package} " in stages["system-torch"]


def test_missing_disk_space_is_reported_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "REQUIRED_BYTES", 1 << 60)

    with pytest.raises(HarnessError, match=r"GiB of free space, but building the image needs 1073741824 GiB: free"):
        build.check_free_space(ImageBuilder(Cache(tmp_path)))
