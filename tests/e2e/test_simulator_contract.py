"""A real API server gives the answers that the simulator is held to, and so the property tests rest on facts."""

from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import uuid4

import pytest
import pytest_asyncio

from finetune_operator.kube.api_client import ApiServer
from finetune_operator.kube.credentials import load_kubeconfig, open_session
from testing.cluster.images.project_images import image_name
from testing.processes.operator_stack import Stack
from testing.simulator.conformance.checks import STORIES, Facts, Raw, Site
from testing.simulator.conformance.expected_results import ANSWERS

pytestmark = pytest.mark.cluster
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def pod(name: str, code: str, **spec: object) -> Raw:
    container = {
        "name": "trainer",
        "image": image_name("operator"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", code],
    }
    body = {"restartPolicy": "Never", "containers": [container], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}


@pytest_asyncio.fixture
async def site(stack: Stack) -> AsyncIterator[Site]:
    namespace = f"contract-{uuid4().hex[:8]}"
    access = load_kubeconfig([stack.provider.kubeconfig])
    async with open_session(access, connections=10) as session:
        api = ApiServer(access.server, calls=session, streams=session)
        site = Site(
            api=api,
            namespace=namespace,
            endless=lambda name: pod(name, DEAF),
            brief=lambda name: pod(name, "raise SystemExit(1)"),
            nowhere=lambda name: pod(name, "", nodeSelector={"example.com/none": "there"}),
        )
        await api.call("POST", "/api/v1/namespaces", body={"kind": "Namespace", "metadata": {"name": namespace}})

        async def has_account() -> bool:
            return await site.ask("GET", f"/api/v1/namespaces/{namespace}/serviceaccounts/default") == "ok"

        await site.until(has_account)
        yield site
        await api.call("DELETE", f"/api/v1/namespaces/{namespace}")


@pytest.mark.parametrize("story", STORIES, ids=[story.__name__ for story in STORIES])
async def test_a_real_cluster_answers_as_the_simulator_does(
    site: Site, story: Callable[[Site], Awaitable[Facts]]
) -> None:
    assert await story(site) == ANSWERS[story.__name__]
