"""Tests of `helm test`: its objects, and the program that its pod runs."""

import importlib.util
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import yaml

from finetune_api.v1alpha1.job import FineTuneJob
from helm import CHART, render_chart
from testing.builders.pod_security import find_restricted_violations
from testing.fakes.http_server import serve_in_background

PROGRAM = CHART / "files" / "installation_test.py"
COLLECTION = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs"
SUSPENDED = {"status": {"conditions": [{"type": "Suspended", "status": "True"}]}}


def render_hooks(helm: Path, *settings: str) -> list[dict[str, Any]]:
    text = render_chart(helm, "installCRD=false", *settings)
    documents = [document for document in yaml.safe_load_all(text) if document]
    return [d for d in documents if d["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]


def get_container(hooks: list[dict[str, Any]]) -> dict[str, Any]:
    (pod,) = (document for document in hooks if document["kind"] == "Pod")
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def test_pod_complies_with_the_restricted_level_and_runs_the_program_in_the_operators_image(helm: Path) -> None:
    hooks = render_hooks(helm)
    (pod,) = (document for document in hooks if document["kind"] == "Pod")

    assert find_restricted_violations(pod) == ()
    assert get_container(hooks)["image"].startswith("ghcr.io/finetune-operator/operator:")
    assert get_container(hooks)["command"][2].strip() == PROGRAM.read_text().strip()


def test_job_of_the_test_is_valid_and_has_the_labels_that_the_policies_require(helm: Path) -> None:
    policies = {"jobs": {"requiredPodLabels": [{"name": "queue", "values": ["small", "large"]}, {"name": "team"}]}}
    variables = {
        v["name"]: v["value"]
        for v in get_container(render_hooks(helm, f"admissionPolicies={json.dumps(policies)}"))["env"]
    }
    body = json.loads(variables["JOB"])

    job = FineTuneJob.parse({**body, "metadata": {"name": "helm-test-x"}})

    assert job.spec.suspend
    assert job.spec.pod_template.labels == {"queue": "small", "team": "test"}


def test_job_is_created_in_the_first_watched_namespace_where_the_test_has_its_role(helm: Path) -> None:
    hooks = render_hooks(helm, 'watchNamespaces=["a","b"]', "userRoles=false")
    namespaces = {document["kind"]: document["metadata"]["namespace"] for document in hooks}

    assert namespaces == {
        "ServiceAccount": "finetune-system",
        "Role": "a",
        "RoleBinding": "a",
        "Pod": "finetune-system",
    }
    assert {"name": "NAMESPACE", "value": "a"} in get_container(hooks)["env"]


class JobHandler(BaseHTTPRequestHandler):
    """API server that creates one job and returns the `states` of it, one per GET; the last one is repeated."""

    states: ClassVar[list[dict[str, Any]]] = []
    requests: ClassVar[list[str]] = []
    rejection = 0

    def handle_request(self) -> None:
        """Record the request and send the next state."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append(f"{self.command} {self.path} {self.headers['Authorization']}")
        states = type(self).states
        state = states.pop(0) if self.command == "GET" and len(states) > 1 else states[0]
        body = json.dumps({"metadata": {"name": "helm-test-x"}, **state} if not self.rejection else {"message": "no"})
        self.send_response(self.rejection or 200)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_POST = do_DELETE = handle_request  # noqa: N815  names of the base class

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  name of the base class
        """Print nothing."""


def import_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("installation_test", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the program with a fake API server, and without delays."""
    module = import_program()
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("NAMESPACE", "team")
    monkeypatch.setenv("JOB", "{}")
    for name, value in (("SERVICE_ACCOUNT", tmp_path), ("TIMEOUT_SECONDS", 0.2), ("POLL_SECONDS", 0.01)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(JobHandler, "requests", [])
    monkeypatch.setattr(JobHandler, "states", [{}, SUSPENDED])
    with serve_in_background(JobHandler) as url:
        monkeypatch.setattr(module, "get_server", lambda: url)
        yield module


def test_test_succeeds_once_the_operator_has_processed_the_job(program: ModuleType) -> None:
    assert program.main() == 0
    name = f"{COLLECTION}/helm-test-x"
    assert JobHandler.requests == [
        f"{request} Bearer secret" for request in (f"POST {COLLECTION}", f"GET {name}", f"GET {name}", f"DELETE {name}")
    ]


def test_test_fails_without_an_operator_and_deletes_its_job(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(JobHandler, "states", [{}])

    assert program.main() == 1
    assert "no operator has processed the job" in capsys.readouterr().out
    assert JobHandler.requests[-1].startswith("DELETE")


def test_test_fails_without_the_crd(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(JobHandler, "rejection", 404)

    assert program.main() == 1
    assert capsys.readouterr().out.endswith('/finetunejobs: 404: {"message": "no"}\n')
    assert len(JobHandler.requests) == 1


def test_a_redirect_with_the_token_is_not_followed(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobHandler, "rejection", 302)

    assert program.main() == 1
    assert JobHandler.requests == [f"POST {COLLECTION} Bearer secret"]


@pytest.mark.parametrize(("host", "url"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")])
def test_server_is_that_of_the_pods_environment(host: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_program()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")

    assert module.get_server() == url
