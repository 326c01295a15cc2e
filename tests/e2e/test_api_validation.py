"""What the API server knows by itself: it refuses a bad job in words, merges server-side applies, and explains."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.builders.bad_jobs import BAD_JOBS
from testing.builders.jobs import spec
from testing.processes.operator_stack import Stack

pytestmark = pytest.mark.cluster
Raw = dict[str, Any]

EXAMPLES = sorted((Path(__file__).parents[2] / "manifests" / "examples").glob("*.yaml"))
SECRET = {"secretKeyRef": {"name": "hub", "key": "token"}}


def body(name: str, **fields: Any) -> Raw:
    """A job that nobody has to run: it is suspended. None removes a field."""
    wanted = spec(**{"suspend": True, **fields})
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name},
        "spec": {key: value for key, value in wanted.items() if value is not None},
    }


def refusal(call: Callable[..., object], *arguments: Any) -> str:
    """What the API server says against it."""
    with pytest.raises(RuntimeError) as refused:
        call(*arguments)
    return str(refused.value)


def dry_run(stack: Stack, job: Raw) -> str:
    return stack.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(job))


@pytest.fixture
def job(stack: Stack, name: str) -> Iterator[Raw]:
    """A job as stored; the operator leaves a suspended one alone, so its spec can be tried on."""
    made = body(
        name,
        suspend=False,
        env=[{"name": "HF_TOKEN", "valueFrom": SECRET}],
        podTemplate={"schedulerName": "nobody", "securityContext": {"runAsUser": 1000}},
    )
    stack.apply(made)
    yield made
    stack.delete(name)


def patch(stack: Stack, job: Raw, fields: Raw) -> str:
    change = yaml.safe_dump({"spec": fields})
    return stack.kubectl("patch", "ftj", job["metadata"]["name"], "--type=merge", f"--patch={change}")


@pytest.mark.parametrize("case", BAD_JOBS)
def test_a_bad_job_is_refused_with_its_reason(stack: Stack, case: str) -> None:
    assert BAD_JOBS[case].api_server in refusal(dry_run, stack, body("bad", **BAD_JOBS[case].fields))


def test_the_base_of_all_bad_jobs_is_accepted(stack: Stack) -> None:
    assert "serverside-applied" in dry_run(stack, body("good"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            "a" * 53, "at most 52 characters, so that the names of its pods fit 63; this one has 53", id="long"
        ),
        pytest.param("7b-lora", "must start with a lower case letter", id="begins with a digit"),
        pytest.param("qwen2.5", "hold only a-z, 0-9 and '-'", id="has a dot"),
    ],
)
def test_a_name_that_no_service_can_have_is_refused(stack: Stack, name: str, words: str) -> None:
    assert words in refusal(dry_run, stack, body(name))
    assert "serverside-applied" in dry_run(stack, body("a" * 52))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted(stack: Stack, path: Path) -> None:
    assert "serverside-applied" in dry_run(stack, yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"model": {"name": "/data/other"}}, "spec.model is immutable; delete the job", id="changed"),
        pytest.param({"training": {"seed": 1}}, "spec.training is immutable", id="added"),
        pytest.param({"lora": None}, "spec.lora is immutable", id="removed"),
        pytest.param(
            {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "other"}}}]},
            "spec.env is immutable",
            id="within a raw part of a pod",
        ),
        pytest.param({"image": "other"}, "only while the job is suspended; set spec.suspend to true", id="image"),
        pytest.param(
            {"podTemplate": {"securityContext": {"runAsUser": 0}}}, "only while the job is suspended", id="pod template"
        ),
        pytest.param({"suspend": True, "image": "other"}, "only while the job is suspended", id="both at once"),
    ],
)
def test_what_cannot_change_while_running_does_not(stack: Stack, job: Raw, fields: Raw, words: str) -> None:
    assert words in refusal(patch, stack, job, fields)


def test_what_may_change_does(stack: Stack, job: Raw) -> None:
    patch(stack, job, {"ttlSecondsAfterFinished": 5, "activeDeadlineSeconds": 60, "restartPolicy": {"maxRestarts": 1}})
    patch(stack, job, {"suspend": True})
    patch(stack, job, {"image": "other", "resources": {"limits": {"memory": "8Gi"}}, "network": {"masterPort": 29501}})
    assert "spec.model is immutable" in refusal(patch, stack, job, {"model": {"name": "/data/other"}})
    patch(stack, job, {"suspend": False, "podTemplate": {"schedulerName": "another"}})

    assert stack.job(job["metadata"]["name"])["spec"]["image"] == "other"


def test_applying_the_same_again_changes_nothing(stack: Stack, name: str) -> None:
    job = body(name)
    try:
        stack.apply(job)
        before = stack.job(name)
        stack.apply(job)
        after = stack.job(name)
    finally:
        stack.delete(name)

    assert after["spec"] == before["spec"] == job["spec"], "and the API server adds nothing of its own"
    assert after["metadata"]["generation"] == before["metadata"]["generation"] == 1


def test_two_appliers_own_their_own_items_of_a_list(stack: Stack, name: str) -> None:
    base, more = body(name), body(name)
    more["spec"] = {**base["spec"], "imagePullSecrets": [{"name": "theirs"}]}
    base["spec"]["imagePullSecrets"] = [{"name": "ours"}]
    apply = ("apply", "--server-side", "-f", "-")
    try:
        stack.kubectl(*apply, "--field-manager=one", stdin=yaml.safe_dump(base))
        stack.kubectl(*apply, "--field-manager=two", stdin=yaml.safe_dump(more))
        secrets = stack.job(name)["spec"]["imagePullSecrets"]
    finally:
        stack.delete(name)

    assert sorted(secret["name"] for secret in secrets) == ["ours", "theirs"]


def test_explain_reads_well(stack: Stack) -> None:
    told = stack.kubectl("explain", "ftj.spec.training")

    assert "Names are\n    those of transformers.TrainingArguments." in told
    assert "learningRate\t<number>\n    Peak learning rate (default 1e-4 with lora, 1e-5 without" in told
    assert "enum: linear, cosine, constant" in told
    assert "<>" not in told


def test_get_has_the_columns_and_the_category(stack: Stack, job: Raw) -> None:
    header, *rows = stack.kubectl("get", "finetune").splitlines()

    assert header.split() == ["NAME", "PHASE", "NODES", "PROGRESS", "LOSS", "TOKENS/S", "ETA", "RESTARTS", "AGE"]
    assert any(row.startswith(job["metadata"]["name"]) for row in rows)
