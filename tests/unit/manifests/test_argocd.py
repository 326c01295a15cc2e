"""Tests of the health and the actions for Argo CD, with the statuses that the operator writes."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator.controller.reconcile import render_status
from testing.builders.jobs import NOW, RawBody, decide_with, finished_pod, job, running_pod, spec

SETTINGS = yaml.safe_load((Path(__file__).parents[3] / "manifests" / "argocd-cm.yaml").read_text())["data"]
HEALTH = SETTINGS["resource.customizations.health.finetune.dev_FineTuneJob"]
ACTIONS = yaml.safe_load(SETTINGS["resource.customizations.actions.finetune.dev_FineTuneJob"])
DEFINITIONS = {definition["name"]: definition["action.lua"] for definition in ACTIONS["definitions"]}


def run_lua(program: str, body: RawBody) -> dict[str, Any]:
    """Run a program as Argo CD does, in Lua 5.1 with the object as global `obj`, and return its result."""
    lua = LuaRuntime(unpack_returned_tuples=True, register_eval=False)
    lua.globals().obj = lua.table_from(body, recursive=True)
    result: dict[str, Any] = to_python(lua.execute(program))
    return result


def to_python(value: Any) -> Any:
    if not hasattr(value, "items"):
        return value
    items = {key: to_python(item) for key, item in value.items()}
    is_list = bool(items) and set(items) == set(range(1, len(items) + 1))
    return [items[index] for index in sorted(items)] if is_list else items


def build_body(owner: FineTuneJob, **spec_fields: Any) -> RawBody:
    """Return the object that the API server stores for a job."""
    metadata = {"name": owner.metadata.name, "generation": owner.metadata.generation}
    return {"metadata": metadata, "spec": spec(**spec_fields), "status": render_status(owner.status)}


def start() -> FineTuneJob:
    return decide_with(job())[0]


def run(owner: FineTuneJob) -> FineTuneJob:
    pods = [running_pod(owner, rank) for rank in (0, 1)]
    return decide_with(owner, *pods, now=NOW + timedelta(seconds=5))[0]


def fail(owner: FineTuneJob) -> FineTuneJob:
    message = '{"version": 1, "outcome": "failed", "errorType": "DatasetError", "message": "row 3", "exitCode": 1}'
    pods = [finished_pod(owner, rank, message=message) for rank in (0, 1)]
    return settle(owner, pods)


def complete(owner: FineTuneJob) -> FineTuneJob:
    pods = [finished_pod(owner, rank, exit_code=0, message='{"outcome": "succeeded"}') for rank in (0, 1)]
    return settle(owner, pods)


def settle(owner: FineTuneJob, pods: list[RawBody]) -> FineTuneJob:
    """Return the job after enough passes to end it."""
    for seconds in range(10, 100, 10):
        owner, _ = decide_with(owner, *pods, now=NOW + timedelta(seconds=seconds))
    return owner


def suspend() -> FineTuneJob:
    return decide_with(job(suspend=True))[0]


@pytest.mark.parametrize(
    ("build", "status", "message"),
    [
        (job, "Progressing", "the operator has not processed the job yet"),
        (start, "Progressing", "Starting: "),
        (lambda: run(start()), "Progressing", "Running: attempt 0 runs on 2 nodes"),
        (lambda: fail(run(start())), "Degraded", "DatasetError: "),
        (lambda: complete(run(start())), "Healthy", "Completed: "),
        (suspend, "Suspended", "Suspended: "),
    ],
    ids=["new", "starting", "running", "failed", "complete", "suspended"],
)
def test_health_follows_the_status_of_the_operator(build: Callable[[], FineTuneJob], status: str, message: str) -> None:
    health = run_lua(HEALTH, build_body(build()))

    assert (health["status"], message in health["message"]) == (status, True), health


def test_a_running_job_shows_its_progress() -> None:
    body = build_body(run(start()))
    body["status"]["display"] = {"progress": "40% 120/300"}

    assert run_lua(HEALTH, body)["message"].startswith("40% 120/300; Running: ")


def test_a_job_that_cannot_be_reconciled_is_degraded() -> None:
    body = build_body(run(start()))
    stalled = {"type": "Stalled", "status": "True", "reason": "ReconcileFailed", "message": "spec of another release"}
    body["status"]["conditions"].append(stalled)

    assert run_lua(HEALTH, body) == {"status": "Degraded", "message": "ReconcileFailed: spec of another release"}


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("status"),
        lambda body: body["status"].update(observedGeneration=-1),
        lambda body: body["status"].pop("observedGeneration"),
        lambda body: body["metadata"].update(generation=2),
    ],
    ids=["no status", "new object", "no generation", "changed spec"],
)
def test_a_status_of_an_earlier_generation_is_progressing(change: Callable[[RawBody], object]) -> None:
    body = build_body(complete(run(start())))
    assert run_lua(HEALTH, body)["status"] == "Healthy"

    change(body)

    assert run_lua(HEALTH, body) == {
        "status": "Progressing",
        "message": "the operator has not processed the job yet",
    }


@pytest.mark.parametrize(
    ("build", "suspended", "enabled"),
    [
        (lambda: run(start()), False, {"suspend", "cancel"}),
        (suspend, True, {"resume", "cancel"}),
        (lambda: complete(run(start())), False, set()),
        (job, False, {"suspend", "cancel"}),
    ],
    ids=["running", "suspended", "complete", "new"],
)
def test_actions_are_enabled_in_the_states_to_which_they_apply(
    build: Callable[[], FineTuneJob], suspended: bool, enabled: set[str]
) -> None:
    actions = run_lua(ACTIONS["discovery.lua"], build_body(build(), suspend=suspended))

    assert {name for name, action in actions.items() if not action["disabled"]} == enabled
    assert actions.keys() == DEFINITIONS.keys()


@pytest.mark.parametrize(
    ("name", "change"), [("suspend", {"suspend": True}), ("resume", {"suspend": False}), ("cancel", {"cancel": True})]
)
def test_an_action_changes_only_its_field(name: str, change: dict[str, bool]) -> None:
    body = build_body(run(start()), suspend=name == "resume")

    changed = run_lua(DEFINITIONS[name], body)

    unchanged = run_lua("return obj", body)
    assert changed == {**unchanged, "spec": {**unchanged["spec"], **change}}
