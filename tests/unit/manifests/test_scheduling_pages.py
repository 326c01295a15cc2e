"""Tests of the manifests in the pages of the group schedulers that the tests do not run."""

import re
from pathlib import Path

import pytest
import yaml

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.scheduling import API_VERSIONS, SchedulingProvider
from finetune_operator.core.provider_choice import choose_provider
from finetune_operator.observation.group_apis import find_group_apis
from testing.builders.jobs import RawBody

FOLDER = Path(__file__).parents[3] / "docs" / "operations" / "scheduling"
PAGES = {
    "coscheduling": SchedulingProvider.COSCHEDULING,
    "volcano": SchedulingProvider.VOLCANO,
    "kai": SchedulingProvider.KAI,
}


def read_documents(page: str) -> list[RawBody]:
    text = (FOLDER / f"{page}.md").read_text()
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("page", PAGES)
def test_job_of_the_page_uses_its_provider(page: str) -> None:
    [document] = [document for document in read_documents(page) if document.get("kind") == "FineTuneJob"]
    metadata = {"namespace": "team", "uid": "1", "generation": 1, "resourceVersion": "1", **document["metadata"]}
    spec = FineTuneJob.parse({**document, "metadata": metadata}).spec

    served = [version for versions in API_VERSIONS.values() for version in versions]
    choice = choose_provider(spec, find_group_apis(served))

    assert not isinstance(choice, str)
    assert choice.provider == PAGES[page]


@pytest.mark.parametrize("page", PAGES)
def test_page_begins_with_what_was_not_run(page: str) -> None:
    title, _, first, *_ = (FOLDER / f"{page}.md").read_text().split("\n")

    assert title.startswith("# ")
    assert first.startswith("**Not run.**")


@pytest.mark.parametrize("page", ["volcano", "kai"])
def test_job_of_the_page_is_in_its_queue(page: str) -> None:
    queue, job, *_ = read_documents(page)

    assert queue["kind"] == "Queue"
    assert job["spec"]["scheduling"]["queueName"] == queue["metadata"]["name"]
