"""Tests of the Karta, from which the pod grouper of KAI reads how a FineTuneJob is built."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from crd import build_crd
from finetune_api.v1alpha1.job import GROUP, KIND, PLURAL, VERSION
from finetune_operator.controller.reconcile import render_status
from kubernetes_schema import load_kubernetes_schema
from testing.builders.jobs import RawBody, decide_with, finished_pod, job, pod, running_pod
from testing.schemas.third_party import load_schema

DOCUMENTS = list(yaml.safe_load_all((Path(__file__).parents[3] / "integrations" / "kai" / "karta.yaml").read_text()))
KARTA, *RBAC = DOCUMENTS
ROOT = KARTA["spec"]["structureDefinition"]["rootComponent"]
CRD_SCHEMA = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
JQ_PATH = re.compile(r"(\.[a-zA-Z.]+)( // 1)?")


def list_paths(value: Any, key: str = "") -> list[str]:
    """Return the jq paths in the root component."""
    if isinstance(value, dict):
        return [path for name, child in value.items() for path in list_paths(child, name)]
    if isinstance(value, list):
        return [path for child in value for path in list_paths(child)]
    return [value] if key.lower().endswith("path") else []


def exists_in_crd(path: str) -> bool:
    schema = CRD_SCHEMA
    for name in path.strip(".").split("."):
        if "properties" not in schema:  # a map
            return False
        if name not in schema["properties"]:
            return False
        schema = schema["properties"][name]
    return True


def find_statuses(body: RawBody) -> list[str]:
    """Return the statuses of Karta whose conditions a job has; all conditions of one matcher have to be present."""
    present = {(condition["type"], condition["status"]) for condition in body["conditions"]}
    return [
        status
        for status, matchers in ROOT["statusDefinition"]["statusMappings"].items()
        if any({(each["type"], each["status"]) for each in matcher["byConditions"]} <= present for matcher in matchers)
    ]


def compute_status(*pods: RawBody, **fields: Any) -> RawBody:
    """Return the status that the operator writes after it has observed these pods twice."""
    current = job(**fields)
    for observed in ((), pods, pods):
        current, _ = decide_with(current, *observed)
    status: RawBody = render_status(current.status)
    return status


def test_karta_agrees_with_the_schema_of_its_crd() -> None:
    assert list(load_schema("karta").find_problems(KARTA)) == []


def test_schema_of_karta_detects_a_misspelt_field() -> None:
    instructions = {"gangScheduling": {"podGroup": {"name": "finetunejob", "minMember": 2}}}

    assert list(load_schema("karta").find_problems({**KARTA, "spec": {**KARTA["spec"], "instructions": instructions}}))


def test_roles_agree_with_the_schema_of_kubernetes() -> None:
    schema = load_kubernetes_schema()
    if schema is None:
        pytest.skip("the Go module of Kubernetes is missing, and Go is not installed")

    assert [problem for document in RBAC for problem in schema.find_problems(document)] == []
    assert RBAC[0]["rules"][0]["resources"] == [PLURAL]
    assert RBAC[1]["roleRef"]["name"] == RBAC[0]["metadata"]["name"]


def test_kai_finds_the_karta_by_the_kind_of_its_root() -> None:
    labels = {f"run.ai/karta-{name}": value for name, value in ROOT["kind"].items()}

    assert ROOT["kind"] == {"group": GROUP, "version": VERSION, "kind": KIND}
    assert KARTA["metadata"]["labels"] == labels


def test_paths_refer_to_fields_of_a_finetunejob() -> None:
    paths = list_paths(ROOT)

    assert len(paths) == 12
    for path in paths:
        match = JQ_PATH.fullmatch(path)
        assert match, path
        assert exists_in_crd(match[1]), path


def test_number_of_replicas_has_the_default_of_the_spec() -> None:
    default = CRD_SCHEMA["properties"]["spec"]["properties"]["numNodes"]["default"]

    assert ROOT["scaleDefinition"]["replicasPath"] == f".spec.numNodes // {default}"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(compute_status(), "initializing", id="no pods"),
        pytest.param(compute_status(pod(job(), 0), pod(job(), 1)), "initializing", id="pending"),
        pytest.param(compute_status(running_pod(job(), 0), running_pod(job(), 1)), "running", id="running"),
        pytest.param(compute_status(suspend=True), "suspended", id="suspended"),
        pytest.param(
            compute_status(
                *(finished_pod(job(), rank, exit_code=2) for rank in (0, 1)), restartPolicy={"maxRestarts": 0}
            ),
            "failed",
            id="failed",
        ),
    ],
)
def test_each_state_of_a_job_has_one_status(body: RawBody, status: str) -> None:
    assert find_statuses(body) == [status]


def test_complete_job_is_completed() -> None:
    conditions = [{"type": "Running", "status": "False"}, {"type": "Suspended", "status": "False"}]
    complete = [{"type": name, "status": "True"} for name in ("Complete", "Finished")]

    assert find_statuses({"conditions": [*conditions, *complete]}) == ["completed"]
