"""Tests that all examples in manifests/ and docs/ are valid jobs."""

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


def load_example(name: str) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(EXAMPLES[name].read_text())
    return body


def test_list_of_examples_is_complete() -> None:
    assert set(EXAMPLES) == {
        *("first", "one-node-four-gpus", "two-nodes-eight-gpus", "cpu-two-nodes", "suspended", "placement", "kueue"),
        *("gang", "host-network", "resource-claims", "dpo", "command", "qwen2-vl", "internvl", "qwen-vl-video"),
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_valid_and_named_after_its_file(name: str) -> None:
    job = FineTuneJob.parse(load_example(name))

    assert job.metadata.name == name


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_valid_against_the_json_schema(name: str) -> None:
    schema = json.loads((MANIFESTS / "finetunejob.schema.json").read_text())

    Draft202012Validator(schema).validate(load_example(name))


def test_json_schema_rejects_a_misspelt_field() -> None:
    schema = json.loads((MANIFESTS / "finetunejob.schema.json").read_text())
    job = load_example("first")
    job["spec"]["numNode"] = 2

    (error,) = Draft202012Validator(schema).iter_errors(job)

    assert "numNode" in error.message


@pytest.mark.parametrize(
    ("name", "effective_batch"),
    [("one-node-four-gpus", 64), ("two-nodes-eight-gpus", 128), ("cpu-two-nodes", 16), ("internvl", 16)],
)
def test_effective_batch_of_example_matches_its_comment(name: str, effective_batch: int) -> None:
    spec = FineTuneJob.parse(load_example(name)).spec
    training = spec.training
    micro_batch_size = training.per_device_train_batch_size or 1
    computed_batch = micro_batch_size * (training.gradient_accumulation_steps or 1) * spec.world_size

    assert (training.global_batch_size or computed_batch) == effective_batch


def read_documented_jobs() -> dict[str, dict[str, Any]]:
    """Return all complete jobs in the READMEs and docs/ by page and job name."""
    jobs = {}
    for page in (*ROOT.glob("README*.md"), *sorted((ROOT / "docs").rglob("*.md"))):
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            if "kind: FineTuneJob" in block:
                job = yaml.safe_load(block)
                jobs[f"{page.relative_to(ROOT).with_suffix('')}: {job['metadata']['name']}"] = job
    return jobs


DOCUMENTED_JOBS = read_documented_jobs()


def test_jobs_in_readme_and_documentation_are_found() -> None:
    assert set(DOCUMENTED_JOBS) >= {
        "README: first",
        "docs/how-to/dpo: dpo",
        "docs/user-guide/command: llamafactory",
        "docs/user-guide/command: minimind",
        "docs/user-guide/command: swift",
    }


@pytest.mark.parametrize("key", DOCUMENTED_JOBS)
def test_documented_job_is_valid(key: str) -> None:
    FineTuneJob.parse(DOCUMENTED_JOBS[key])


def test_first_example_has_at_most_fifteen_lines() -> None:
    lines = EXAMPLES["first"].read_text().splitlines()

    assert len([line for line in lines if not line.startswith("#")]) <= 15
