"""Tests that the how-to pages contain the examples, real output of the CLI, and only existing fields and reasons.

The code blocks of the Chinese pages are identical (test_translations.py).
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from finetune_api.v1alpha1.reasons import Reason
from finetune_cli.app import app
from finetune_cli.errors import BadInput
from translations import BLOCK

ROOT = Path(__file__).parents[3]
EXAMPLES = {path.stem: path for path in (ROOT / "manifests" / "examples").glob("*.yaml")}
PAGES = {path.stem: path for path in sorted((ROOT / "docs" / "how-to").glob("*.md")) if path.stem != "index"}
TEXTS = [
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted((ROOT / "docs" / "zh").rglob("*.md")),
    ROOT / "docs" / "user-guide" / "convert.md",
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
]
EXAMPLES_BY_PAGE = {
    "data-parallel": ["one-node-four-gpus"],
    "batch-size": ["internvl"],
    "multi-node": ["qwen2-vl"],
    "dpo": ["dpo", "command"],
}
OTHER_NAMES = {"FineTuneJob", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "KubeflowCallback"}
OTHER_TOOLS_SETTINGS = {"stage: ppo", "rl: dpo", "rl: ipo"}  # of LLaMA-Factory and axolotl
CONVERTED = "# Converted by finetune convert"  # of a job that test_converted_commands.py compares with the program
SCHEMA = json.loads((ROOT / "manifests" / "finetunejob.schema.json").read_text())
SPEC_FIELDS = SCHEMA["properties"]["spec"]["properties"]
PRESENCE = ("required", "oneOf", "anyOf", "allOf")  # keywords that require fields
MAPS = ("resources.limits.", "resources.requests.", "spec.resources.limits.")  # fields whose keys are free
FIELD = re.compile(r"`((?:[a-z][A-Za-z0-9]*)(?:\.[a-z][A-Za-z0-9]*)+)(?:: [^`]*)?`")
SETTING = re.compile(r"`([a-z][A-Za-z0-9.]*: [^`]+)`")
REASON = re.compile(r"`((?:[A-Z][a-z]+){2,})`")


def read_blocks(page: Path, language: str) -> list[str]:
    """Return the content of all code blocks of a page in one language."""
    blocks = BLOCK.finditer(page.read_text())
    return [block["content"] for block in blocks if block["language"] == language]


def read_fields() -> set[str]:
    """Return the names of all fields in the reference, with spec. and status. only where they are written."""
    reference = (ROOT / "docs" / "reference" / "finetunejob.md").read_text()
    spec, status = reference.split("\n## Status\n")
    names = [
        {name.replace("[]", "") for name in re.findall(r"^\| `([A-Za-z0-9.\[\]]+)` \|", part, re.MULTILINE)}
        for part in (spec, status.split("\n### ")[0])
    ]
    return names[0] | {f"spec.{name}" for name in names[0]} | {f"status.{name}" for name in names[1]}


def read_degradations() -> set[str]:
    """Return the reasons of status.degraded in the user guide."""
    page = (ROOT / "docs" / "user-guide" / "monitoring.md").read_text()
    return set(re.findall(r"^\| `((?:[A-Z][A-Za-z0-9]+))` \|", page, re.MULTILINE))


def build_spec(setting: str) -> dict[str, Any]:
    """Return the part of a spec that a setting such as `training.optim: adamw_8bit` describes.

    A name without a dot is a field of the spec or of spec.training.
    """
    name, _, value = setting.partition(": ")
    path = name.removeprefix("spec.").split(".")
    if path[0] not in SPEC_FIELDS:
        path.insert(0, "training")
    spec = yaml.safe_load(value)
    for part in reversed(path):
        spec = {part: spec}
    return dict(spec)


def test_every_how_to_page_names_its_examples() -> None:
    assert set(PAGES) == set(EXAMPLES_BY_PAGE)


@pytest.mark.parametrize("page", PAGES)
def test_jobs_of_how_to_page_are_a_converted_one_and_the_examples(page: str) -> None:
    jobs = [block for block in read_blocks(PAGES[page], "yaml") if "kind: FineTuneJob" in block]
    converted, examples = jobs[:1], jobs[1:]

    assert [job.splitlines()[0].startswith(CONVERTED) for job in converted] == [True]
    assert examples == [EXAMPLES[name].read_text() for name in EXAMPLES_BY_PAGE[page]]


@pytest.mark.parametrize(
    ("page", "example"), [(page, name) for page, names in EXAMPLES_BY_PAGE.items() for name in names]
)
def test_plan_of_how_to_page_is_the_output_of_the_program(page: str, example: str) -> None:
    result = CliRunner().invoke(app, ["plan", "-o", "summary", str(EXAMPLES[example])])
    printed = re.sub(r"trainer:\S+", "trainer:v0.1.0", result.stdout)

    assert printed in read_blocks(PAGES[page], "")


def test_batch_errors_of_how_to_page_are_the_output_of_the_program(tmp_path: Path) -> None:
    job = yaml.safe_load(EXAMPLES["internvl"].read_text())
    path = tmp_path / "job.yaml"
    problems: list[str] = []
    for sizes in ({"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 8}, {"perDeviceTrainBatchSize": 3}):
        job["spec"]["training"] = {"globalBatchSize": 16, **sizes}
        path.write_text(yaml.safe_dump(job))
        with pytest.raises(BadInput) as raised:
            CliRunner().invoke(app, ["validate", str(path)], catch_exceptions=False)
        problems += raised.value.problems

    printed = "".join(f"{problem}\n" for problem in problems).replace(f"{tmp_path}/", "")
    assert printed in read_blocks(PAGES["batch-size"], "")


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_fields_that_a_page_names_exist(page: Path) -> None:
    fields = read_fields()
    known = ("spec", "status", *{field.partition(".")[0] for field in fields})

    named = {name for name in FIELD.findall(page.read_text()) if name.startswith(tuple(f"{part}." for part in known))}

    assert sorted(name for name in named - fields if not name.startswith(MAPS)) == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_a_page_names_are_valid(page: Path) -> None:
    validator = Draft202012Validator(SCHEMA)

    settings = set(SETTING.findall(page.read_text())) - OTHER_TOOLS_SETTINGS
    specs = {setting: build_spec(setting) for setting in settings}

    errors = {
        setting: [error.message for error in validator.iter_errors({"spec": spec}) if error.validator not in PRESENCE]
        for setting, spec in specs.items()
    }
    assert {setting: messages for setting, messages in errors.items() if messages} == {}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_reasons_that_a_page_names_exist(page: Path) -> None:
    named = set(REASON.findall(page.read_text()))

    assert named <= {*map(str, Reason), *read_degradations(), *OTHER_NAMES}


def test_fields_and_reasons_are_found_in_how_to_pages() -> None:
    text = "".join(page.read_text() for page in PAGES.values())

    assert len(set(FIELD.findall(text))) > 50
    assert len(set(SETTING.findall(text))) > 25
    assert len(set(REASON.findall(text))) > 20
    assert len(BLOCK.findall(text)) > 20
