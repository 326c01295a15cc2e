"""Conformance tests that compare a real cluster with the results expected from the simulator."""

from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import uuid4

import pytest
import pytest_asyncio

from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.api_paths import build_path
from finetune_operator.kube.credentials import load_kubeconfig, open_session
from testing.cluster.images.project_images import get_image_name
from testing.processes.operator_stack import OperatorInstallation
from testing.simulator.conformance.checks import CHECKS, ClusterUnderTest, Facts, RawBody
from testing.simulator.conformance.expected_results import EXPECTED_RESULTS

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
IGNORE_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def build_pod(name: str, python_code: str, **spec: object) -> RawBody:
    container = {
        "name": "trainer",
        "image": get_image_name("operator"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", python_code],
    }
    body = {"restartPolicy": "Never", "containers": [container], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}


@pytest_asyncio.fixture
async def tested_cluster(deployment: OperatorInstallation) -> AsyncIterator[ClusterUnderTest]:
    namespace = f"contract-{uuid4().hex[:8]}"
    access = load_kubeconfig([deployment.provider.kubeconfig])
    async with open_session(access, connections=10) as session:
        api = ApiClient(access.server, request_session=session, watch_session=session)
        tested_cluster = ClusterUnderTest(
            api=api,
            namespace=namespace,
            build_long_running_pod=lambda name: build_pod(name, IGNORE_SIGTERM),
            build_short_lived_pod=lambda name: build_pod(name, "raise SystemExit(1)"),
            build_unschedulable_pod=lambda name: build_pod(name, "", nodeSelector={"example.com/none": "there"}),
        )
        await api.call(
            "POST", build_path("v1", "namespaces"), body={"kind": "Namespace", "metadata": {"name": namespace}}
        )

        async def has_service_account() -> bool:
            return (
                await tested_cluster.request(
                    "GET", build_path("v1", "namespaces", namespace, "serviceaccounts", "default")
                )
                == "ok"
            )

        await tested_cluster.wait_until(has_service_account)
        yield tested_cluster
        await api.call("DELETE", build_path("v1", "namespaces", namespace))


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
async def test_real_cluster_behaves_like_the_simulator(
    tested_cluster: ClusterUnderTest, check: Callable[[ClusterUnderTest], Awaitable[Facts]]
) -> None:
    assert await check(tested_cluster) == EXPECTED_RESULTS[check.__name__]
