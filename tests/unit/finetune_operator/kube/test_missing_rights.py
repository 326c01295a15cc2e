"""Tests that each refused right of the operator's role is known by name until it is granted."""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from finetune_api.v1alpha1.scheduling import API_VERSIONS, SchedulingProvider
from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import COLLECTIONS, ApiPath, build_path
from finetune_operator.kube.missing_rights import parse_missing_right
from testing.fakes.api_client import serve_and_connect
from testing.fakes.http_api import HttpApi

INSTALLATION = Path(__file__).parents[4] / "manifests/install.yaml"
VERSIONS = {
    **{plural: version for version, plural in COLLECTIONS.values()},
    "localqueues": "visibility.kueue.x-k8s.io/v1beta2",
    "podgroups": API_VERSIONS[SchedulingProvider.POD_GROUP][0],
}
# The operator sends no such request; an admission plugin checks the right when a child is created.
NOT_REQUESTED = {"update finetunejobs/finalizers"}
Request = Callable[[ApiClient, ApiPath], Awaitable[object]]


async def list_objects(api: ApiClient, path: ApiPath) -> object:
    return [page async for page in api.list_pages(path)]


async def watch(api: ApiClient, path: ApiPath) -> object:
    async for event in api.watch(path, selector="", version="0"):
        return event
    return None


REQUESTS: dict[str, Request] = {
    "list": list_objects,
    "watch": watch,
    "create": lambda api, path: api.call_once("POST", path, body={"metadata": {"name": "a"}}),
    "get": lambda api, path: api.call_once("GET", path),
    "update": lambda api, path: api.call_once("PUT", path, body={"metadata": {}, "status": {}, "spec": {}}),
    "delete": lambda api, path: api.call_once("DELETE", path, body={}),
}


def list_rights() -> list[str]:
    documents = yaml.safe_load_all(INSTALLATION.read_text(encoding="utf-8"))
    role = next(d for d in documents if d["kind"] == "ClusterRole" and d["metadata"]["name"] == "finetune-operator")
    return [f"{verb} {resource}" for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]]


def find_path(verb: str, resource: str) -> ApiPath:
    plural, *subresource = resource.split("/")
    name = () if verb in ("list", "watch", "create") else ("a", *subresource)
    return build_path(VERSIONS[plural], "namespaces", "default", plural, *name)


@pytest.mark.parametrize("right", sorted(set(list_rights()) - NOT_REQUESTED))
async def test_each_right_of_the_role_is_named_while_it_is_refused(
    api: HttpApi, right: str, caplog: pytest.LogCaptureFixture
) -> None:
    (verb, resource) = right.split(" ")
    path = find_path(verb, resource)
    async with serve_and_connect(api) as client:
        api.refused_rights = {right}
        for _ in range(2):
            with pytest.raises(ApiError), caplog.at_level(logging.ERROR):
                await REQUESTS[verb](client, path)
        assert client.missing_rights.list("default") == (right,)
        assert client.missing_rights.list("other") == ()

        api.refused_rights = set()
        api.put("finetunejobs", {"metadata": {"name": "a"}})
        if verb == "watch":
            api.compact()  # the watch then ends with its first event
        with suppress(ApiError):  # 404 also proves the right
            await REQUESTS[verb](client, path)
        assert client.missing_rights.list("default") == ()
    [record] = caplog.records
    assert f"no permission to {right};" in record.getMessage()


def test_all_rights_of_the_role_are_covered() -> None:
    assert len(list_rights()) > 20
    assert set(list_rights()) >= NOT_REQUESTED


@pytest.mark.parametrize(
    ("message", "right"),
    [
        pytest.param(
            'podgroups.scheduling.k8s.io "a" is forbidden: User "system:serviceaccount:s:o" cannot delete resource'
            ' "podgroups" in API group "scheduling.k8s.io" in the namespace "n"',
            "delete podgroups.scheduling.k8s.io",
            id="group",
        ),
        pytest.param('forbidden: User "u" cannot get path "/apis"', "get /apis", id="path"),
        pytest.param(
            'pods "a" is forbidden: cannot set blockOwnerDeletion if an ownerReference refers to a resource you can\'t'
            " set finalizers on: , <nil>",
            "update finetunejobs/finalizers.finetune.dev",
            id="finalizers",
        ),
        pytest.param('pods "a" is forbidden: exceeded quota: q, requested: pods=1, used: pods=3', "", id="quota"),
        pytest.param('pods "a" is forbidden: ValidatingAdmissionPolicy "p" denied request: User x', "", id="policy"),
    ],
)
def test_only_refusals_of_the_authorizer_are_missing_rights(message: str, right: str) -> None:
    assert parse_missing_right(message) == right
