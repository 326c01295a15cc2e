"""Every example is a job that would be taken."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from finetune_api.v1alpha1.job import FineTuneJob

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "manifests"
EXAMPLES = {path.stem: path for path in sorted((MANIFESTS / "examples").glob("*.yaml"))}


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(EXAMPLES[name].read_text())
    return loaded


def test_the_examples_that_the_pages_promise_are_there() -> None:
    assert set(EXAMPLES) == {
        "first",
        "one-node-four-gpus",
        "two-nodes-eight-gpus",
        "cpu-two-nodes",
        "suspended",
        "placement",
        "dpo",
        "command",
        "qwen2-vl",
        "internvl",
        "qwen-vl-video",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_named_after_its_file_and_fits_the_models(name: str) -> None:
    job = FineTuneJob.parse(load(name))

    assert job.metadata.name == name


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_the_schema_for_editors(name: str) -> None:
    schema = json.loads((MANIFESTS / "finetunejob.schema.json").read_text())

    Draft202012Validator(schema).validate(load(name))


def test_the_schema_for_editors_sees_a_misspelt_field() -> None:
    schema = json.loads((MANIFESTS / "finetunejob.schema.json").read_text())
    job = load("first")
    job["spec"]["numNode"] = 2

    (error,) = Draft202012Validator(schema).iter_errors(job)

    assert "numNode" in error.message


@pytest.mark.parametrize(
    ("name", "effective"),
    [("one-node-four-gpus", 64), ("two-nodes-eight-gpus", 128), ("cpu-two-nodes", 16), ("internvl", 16)],
)
def test_the_effective_batch_is_what_the_comment_says(name: str, effective: int) -> None:
    spec = FineTuneJob.parse(load(name)).spec
    training = spec.training
    per_device = training.per_device_train_batch_size or 1
    given = per_device * (training.gradient_accumulation_steps or 1) * spec.world_size

    assert (training.global_batch_size or given) == effective


def jobs_of_the_pages() -> dict[str, dict[str, Any]]:
    """Whole jobs in README and docs, by page and name."""
    found = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            if "kind: FineTuneJob" in block:
                job = yaml.safe_load(block)
                found[f"{page.stem}: {job['metadata']['name']}"] = job
    return found


PAGES = jobs_of_the_pages()


def test_the_pages_show_jobs() -> None:
    assert set(PAGES) >= {"README: first", "command: minimind", "command: swift", "command: llamafactory"}


@pytest.mark.parametrize("shown", PAGES)
def test_a_job_of_a_page_fits_the_models(shown: str) -> None:
    FineTuneJob.parse(PAGES[shown])


def test_the_first_job_is_fifteen_lines_at_most() -> None:
    lines = EXAMPLES["first"].read_text().splitlines()

    assert len([line for line in lines if not line.startswith("#")]) <= 15
