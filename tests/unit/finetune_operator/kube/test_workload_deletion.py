"""Tests that only Workloads of the job's own pods are deleted: everybody can write the name and owners of one."""

from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.kube.cluster import KubernetesCluster, ObjectRef
from finetune_operator.observation.ownership import JobOwner, RawBody
from testing.builders.jobs import UID
from testing.fakes.api_client import serve_and_connect
from testing.fakes.http_api import HttpApi

OWN_POD = {"apiVersion": "v1", "kind": "Pod", "name": "bert-0-0", "uid": "own"}


def own(**changes: Any) -> RawBody:
    return {**OWN_POD, **changes}


@pytest.mark.parametrize(
    ("owners", "is_deleted"),
    [
        pytest.param([OWN_POD], True, id="pod of the job"),
        pytest.param([OWN_POD, own(name="bert-0-1", uid="other")], True, id="pods of the job"),
        pytest.param([OWN_POD, own(name="web-0")], False, id="another pod beside it"),
        pytest.param([own(name="bert-large-0-0")], False, id="pod of a job with a longer name"),
        pytest.param([own(uid="other")], False, id="pod that does not exist"),
        pytest.param([own(apiVersion="batch/v1", kind="Job")], False, id="another kind"),
        pytest.param([own(apiVersion="example.com/v1")], False, id="another group"),
        pytest.param([], False, id="no owner"),
    ],
)
async def test_a_workload_is_deleted_only_if_its_owners_are_pods_of_the_job(
    api: HttpApi, owners: list[RawBody], is_deleted: bool
) -> None:
    name = f"bert-{UID[:8]}"
    api.put("workloads", {"metadata": {"name": name, "ownerReferences": owners}})
    target = ObjectRef(
        names.WORKLOAD_KIND, "default", name, "", owner=JobOwner("bert", UID), pod_uids=frozenset({"own"})
    )
    async with serve_and_connect(api) as server:
        await KubernetesCluster(server).delete(target)

    assert (api.objects == {}) is is_deleted
