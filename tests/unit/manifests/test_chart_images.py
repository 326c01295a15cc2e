"""Tests of the images of the chart: one value replaces the registry of all of them, also in the operator's pods."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from check_manifests import CHART_SETTINGS
from finetune_operator.plan.pod_manifest import build_pod
from finetune_operator.plan.run_plan import plan_run
from finetune_operator.settings import Settings
from helm import CHART, list_images, render_chart
from testing.builders.jobs import job

ROOT = CHART.parents[1]
DIGEST = f"sha256:{'0' * 64}"


def render_images(helm: Path, *settings: str) -> list[str]:
    return list_images(yaml.safe_load_all(render_chart(helm, "installCRD=false", *settings)))


@pytest.mark.parametrize("settings", CHART_SETTINGS.values(), ids=CHART_SETTINGS)
def test_no_container_uses_another_registry_than_the_global_one(helm: Path, settings: tuple[str, ...]) -> None:
    images = render_images(helm, *settings, 'global={"imageRegistry":"registry.example:5000/mirror"}')

    assert images == [
        "registry.example:5000/mirror/finetune-operator/operator:v0.1.0",
        "registry.example:5000/mirror/finetune-operator/trainer:v0.1.0",
    ]


def test_all_containers_of_a_training_pod_use_the_trainer_image_that_the_chart_sets() -> None:
    settings = Settings(trainer_image="registry.example/trainer:v1", supervisor="UEsDBA==")
    run_plan = plan_run(job(), attempt=0, settings=settings)
    pod = build_pod(run_plan, run_plan.nodes[0])

    assert list_images([pod]) == ["registry.example/trainer:v1"]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("ghcr.io/a/trainer:v1", "mirror.example/a/trainer:v1"),
        ("localhost/trainer", "mirror.example/trainer"),
        ("registry:5000/trainer", "mirror.example/trainer"),
        ("team/trainer:v1", "mirror.example/team/trainer:v1"),
        ("trainer:v1", "mirror.example/trainer:v1"),
        (f"ghcr.io/a/trainer@{DIGEST}", f"mirror.example/a/trainer@{DIGEST}"),
    ],
)
def test_only_the_registry_of_an_image_is_replaced(helm: Path, image: str, expected: str) -> None:
    images = render_images(helm, f'trainerImage="{image}"', 'global={"imageRegistry":"mirror.example"}')

    assert expected in images


def test_digest_replaces_the_tag_of_the_operator(helm: Path) -> None:
    images = render_images(helm, f'image={{"tag":"v9","digest":"{DIGEST}"}}')

    assert f"ghcr.io/finetune-operator/operator@{DIGEST}" in images


def test_images_of_the_list_and_of_the_annotation_are_those_of_the_chart(helm: Path) -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    annotated: list[dict[str, Any]] = yaml.safe_load(annotations["artifacthub.io/images"])

    images = render_images(helm)

    assert (ROOT / "manifests" / "images.txt").read_text().split() == images
    assert sorted(entry["image"] for entry in annotated) == images
