"""Image archives, and what an image is built from."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from testing.cluster.host.cache import Cache
from testing.cluster.images.oci import keep_newest_image_uncompressed, stream_missing, write_single_layer_image
from testing.cluster.images.project_images import (
    BUILD_FILES,
    CODE,
    REPOSITORY,
    ImageBuilder,
    docker_arguments,
    render_pip_settings,
    source_files,
)


def names_in(archive: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {member.name for member in opened}


def streamed(image: Path, *, present: set[str]) -> set[str]:
    target = io.BytesIO()
    stream_missing(image, target, present=present)
    return names_in(target.getvalue())


def small_image(folder: Path) -> Path:
    archive = folder / "small.tar"
    write_single_layer_image(archive, name="localhost/small:1", files={"run": b"program"}, entrypoint=("/run",))
    return archive


def test_a_single_layer_image_names_its_blobs_by_their_content(tmp_path: Path) -> None:
    archive = small_image(tmp_path)

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


def test_equal_input_gives_an_equal_image(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    assert small_image(tmp_path / "a").read_bytes() == small_image(tmp_path / "b").read_bytes()


def test_blobs_that_a_node_has_are_not_sent_again(tmp_path: Path) -> None:
    archive = small_image(tmp_path)
    everything = streamed(archive, present=set())
    one = next(name for name in sorted(everything) if name.startswith("blobs/"))

    rest = streamed(archive, present={"sha256:" + one.rpartition("/")[2]})

    assert everything - rest == {one}
    assert {"oci-layout", "index.json"} <= rest


def test_an_unpacked_layout_streams_like_its_archive(tmp_path: Path) -> None:
    archive = small_image(tmp_path)
    layout = tmp_path / "layout"
    with tarfile.open(archive) as opened:
        opened.extractall(layout, filter="data")

    assert streamed(layout, present=set()) == streamed(archive, present=set())


def put(layout: Path, content: bytes) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    folder = layout / "blobs" / "sha256"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def put_image(layout: Path, layer: bytes) -> dict[str, object]:
    compressed = put(layout, gzip.compress(layer)) | {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}
    manifest = {"config": put(layout, b"{}" + layer), "layers": [compressed]}
    return put(layout, json.dumps(manifest).encode())


def test_a_layout_keeps_only_the_newest_image_with_its_layers_unpacked(tmp_path: Path) -> None:
    images = [put_image(tmp_path, layer) for layer in (b"old layer", b"new layer")]
    (tmp_path / "index.json").write_text(json.dumps({"manifests": images}))

    keep_newest_image_uncompressed(tmp_path)

    (listed,) = json.loads((tmp_path / "index.json").read_text())["manifests"]
    blobs = {path.name: path.read_bytes() for path in (tmp_path / "blobs" / "sha256").iterdir()}
    manifest = json.loads(blobs[listed["digest"].removeprefix("sha256:")])
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar"
    assert blobs[layer["digest"].removeprefix("sha256:")] == b"new layer"
    assert layer["size"] == len(b"new layer")
    assert len(blobs) == 3
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in blobs.items())


def repository(folder: Path) -> Path:
    for name in BUILD_FILES:
        (folder / name).write_text(name)
    for code in {code for codes in CODE.values() for code in codes}:
        (folder / code).mkdir(parents=True, exist_ok=True)
        (folder / code / "module.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    ("changed", "renewed"),
    [
        pytest.param("operator/finetune_operator/module.py", {"operator"}, id="the operator's code"),
        pytest.param("trainer/finetune_trainer/module.py", {"trainer"}, id="the trainer's code"),
        pytest.param("trainer/finetune_supervisor/module.py", {"operator", "trainer"}, id="the supervisor"),
        pytest.param("operator/finetune_api/module.py", {"operator", "trainer"}, id="the contract"),
        pytest.param("constraints.txt", {"operator", "trainer"}, id="a requirement"),
    ],
)
def test_an_image_is_built_anew_only_for_a_change_of_what_it_holds(
    tmp_path: Path, changed: str, renewed: set[str]
) -> None:
    source = repository(tmp_path)
    builder = ImageBuilder(Cache(tmp_path / "cache"), repository=source)
    before = {target: builder.content_key(target) for target in CODE}

    (source / changed).write_text("changed")

    assert {target for target in CODE if builder.content_key(target) != before[target]} == renewed


def test_the_repositorys_own_images_have_sources() -> None:
    for target in CODE:
        names = [str(path.relative_to(REPOSITORY)) for path in source_files(REPOSITORY, target)]
        assert {"Dockerfile", "constraints.txt", "operator/finetune_api/v1alpha1/job.py"} <= {*names}
        assert not [name for name in names if "__pycache__" in name]


def test_pip_in_a_build_trusts_the_lent_certificates_and_prefers_the_lent_wheels() -> None:
    text = render_pip_settings({"index-url": "https://index.example"}, find_links=("http://127.0.0.1:1/",))

    assert text.splitlines() == [
        "[global]",
        "cert = /run/secrets/certificates",
        "index-url = https://index.example",
        "find-links =",
        "    http://127.0.0.1:1/",
    ]


def test_docker_is_told_of_a_base_image_only_where_one_is_named() -> None:
    assert docker_arguments({}) == ()
    assert docker_arguments({"BASE_IMAGE": "x@sha256:1"}) == ("--build-arg", "BASE_IMAGE=x@sha256:1")
