"""Tests that all attempts of a job load the same commit of a model on the Hub."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import PeftConfig
from safetensors.torch import load_file

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import HubUnavailable, ModelError, ModelNotFound
from finetune_trainer.model.load import ModelDescription, describe_model, load_model, read_config
from finetune_trainer.model.revision import pin_revision
from finetune_trainer.once_per_job import DownloadSettings
from finetune_trainer.vision.save_processor import save_processor
from testing.fakes.downloads import NO_DOWNLOADS, build_download_settings
from testing.fakes.hub import FakeHub, FakeModel, serve_hub, set_endpoint
from testing.models import tiny_text, tiny_vision

FIRST, SECOND = "1" * 40, "2" * 40
NAME = "acme/base"
SOURCE = ModelSource(name=NAME)
MAX_LENGTHS = {FIRST: 128, SECOND: 256}


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder per commit, whose models differ in their weights and in their maximum length."""
    folders = {}
    for commit, length in MAX_LENGTHS.items():
        folders[commit] = tmp_path_factory.mktemp(commit)
        tokenizer = tiny_text.build_tokenizer()
        tokenizer.save_pretrained(folders[commit])
        model = tiny_text.build_model(len(tokenizer), seed=length)
        model.config.max_position_embeddings = length
        model.save_pretrained(folders[commit])
    return folders


@pytest.fixture
def hub(model_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Return a Hub whose model has the first commit, used with an empty local cache."""
    with serve_hub() as hub:
        hub.models[NAME] = FakeModel()
        hub.models[NAME].push(FIRST, model_folders[FIRST])
        set_endpoint(monkeypatch, hub.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


@pytest.fixture
def downloads(tmp_path: Path) -> DownloadSettings:
    return build_download_settings(tmp_path / "job")


def describe(source: ModelSource) -> ModelDescription:
    return describe_model(source, torch.device("cpu"))


def test_a_later_attempt_loads_the_commit_of_the_first_after_main_moved(
    hub: FakeHub, downloads: DownloadSettings, model_folders: dict[str, Path], tmp_path: Path
) -> None:
    spec = TrainerSpec.model_validate(
        {
            "model": {"name": NAME},
            "dataset": {"train": [{"name": "/rows"}]},
            "sft": {},
            "lora": {"r": 2},
            "output": {"persistentVolumeClaim": {"claimName": "c"}},
        }
    )
    assert pin_revision(spec.model, downloads).revision == FIRST
    hub.models[NAME].push(SECOND, model_folders[SECOND])

    model_description = describe(pin_revision(spec.model, downloads))
    model = load_model(spec, model_description)

    assert model_description.revision == FIRST
    assert model_description.max_length == MAX_LENGTHS[FIRST]
    expected = load_file(model_folders[FIRST] / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, expected)  # type: ignore[operator]
    assert not any(f"/resolve/{SECOND}/" in path for path in hub.requested_paths)
    model.save_pretrained(tmp_path / "result")  # type: ignore[operator]
    result = PeftConfig.from_pretrained(tmp_path / "result")
    assert (result.base_model_name_or_path, result.revision) == (NAME, FIRST)
    assert pin_revision(spec.model, build_download_settings(downloads.folder, job="another")).revision == SECOND


def test_processor_files_are_read_from_the_same_commit_after_main_moved(
    hub: FakeHub, downloads: DownloadSettings, tmp_path: Path
) -> None:
    folder = tiny_vision.build(tmp_path / "vision")
    model = hub.models["acme/vision"] = FakeModel()
    model.push(FIRST, folder)
    pinned = pin_revision(ModelSource(name="acme/vision"), downloads)
    settings = json.loads((folder / "video_preprocessor_config.json").read_text())
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**settings, "fps": 7}))
    model.push(SECOND, folder)
    hub.requested_paths.clear()

    model_description = describe(pinned)
    assert model_description.vision is not None
    assert model_description.vision.video_processor is not None
    save_processor(model_description.vision, model_description.name, model_description.revision, tmp_path)

    assert model_description.vision.video_processor.sampling.fps != 7
    assert not [path for path in hub.requested_paths if "/resolve/" in path and f"/resolve/{FIRST}/" not in path]
    assert any(path.endswith(f"/resolve/{FIRST}/preprocessor_config.json") for path in hub.requested_paths)


def test_the_commit_is_resolved_once_for_all_ranks_and_attempts(hub: FakeHub, downloads: DownloadSettings) -> None:
    pin_revision(SOURCE, downloads)
    request_count = len(hub.requested_paths)

    assert pin_revision(SOURCE, downloads).revision == FIRST
    assert pin_revision(SOURCE, dataclasses.replace(downloads, is_writer=False)).revision == FIRST
    assert len(hub.requested_paths) == request_count


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", FIRST], ids=["tag", "reference with slashes", "commit"])
def test_a_tag_or_commit_is_resolved_instead_of_main(
    hub: FakeHub, downloads: DownloadSettings, model_folders: dict[str, Path], revision: str
) -> None:
    hub.models[NAME].push(SECOND, model_folders[SECOND])
    hub.models[NAME].refs |= {"v1.0": FIRST, "refs/pr/1": FIRST}

    assert pin_revision(ModelSource(name=NAME, revision=revision), downloads).revision == FIRST


def test_waiting_for_the_commit_times_out_if_rank_zero_does_not_resolve_it(downloads: DownloadSettings) -> None:
    with pytest.raises(HubUnavailable, match=r'did not resolve the commit of model "acme/base" .*ddpTimeout'):
        pin_revision(SOURCE, dataclasses.replace(downloads, is_writer=False))


@pytest.mark.parametrize("failure", ["offline mode", "server error", "no connection"])
def test_without_the_hub_the_commit_of_the_local_cache_is_used(
    hub: FakeHub, downloads: DownloadSettings, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    describe(pin_revision(SOURCE, downloads))  # an earlier job filled the cache
    hub.error_status = 501  # HTTP status code that the Hub client does not retry
    if failure == "offline mode":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if failure == "no connection":
        set_endpoint(monkeypatch, "http://127.0.0.1:9")

    pinned = pin_revision(SOURCE, build_download_settings(downloads.folder, job="another"))

    assert pinned.revision == FIRST


@pytest.mark.parametrize("failure", ["offline mode", "server error"])
def test_without_the_hub_and_a_cached_model_the_error_is_retryable(
    hub: FakeHub, downloads: DownloadSettings, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    hub.error_status = 501
    if failure == "offline mode":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(HubUnavailable, match='"acme/base" could not be read from the Hub'):
        pin_revision(SOURCE, downloads)

    assert not list(downloads.folder.glob("*.json"))


def test_a_missing_gated_or_unknown_revision_is_a_user_error(hub: FakeHub, downloads: DownloadSettings) -> None:
    hub.models["acme/gated"] = FakeModel(is_gated=True)

    with pytest.raises(ModelNotFound, match=r'spec\.model\.name: "acme/none" is neither a path nor a model'):
        pin_revision(ModelSource(name="acme/none"), downloads)
    with pytest.raises(ModelNotFound, match=r'spec\.model\.name: access to "acme/gated" is gated'):
        pin_revision(ModelSource(name="acme/gated"), downloads)
    with pytest.raises(ModelNotFound, match=r'spec\.model\.revision: "v9" is no branch, tag or commit of model'):
        pin_revision(ModelSource(name=NAME, revision="v9"), downloads)


def test_senseless_sizes_of_a_model_on_the_hub_are_refused_by_name(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 10**9}))
    hub.models["acme/large"] = FakeModel()
    hub.models["acme/large"].push(FIRST, tmp_path)

    with pytest.raises(ModelError, match=r"config\.json: num_hidden_layers is 1000000000, and must be from 1 to"):
        read_config(ModelSource(name="acme/large"))


def test_a_path_is_not_resolved(model_folders: dict[str, Path]) -> None:
    source = ModelSource(name=str(model_folders[FIRST]))

    assert pin_revision(source, NO_DOWNLOADS) == source
    assert describe(source).revision is None
