"""Access the Kubernetes API, over HTTP for readiness checks and through kubectl for all other requests."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.cluster.host.commands import HarnessError, run, try_run

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Kubectl:
    """Runs `kubectl` with one kubeconfig."""

    program: Path
    kubeconfig: Path

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        return run(self.program, "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin)

    def succeeds(self, *arguments: str) -> bool:
        return try_run(self.program, "--kubeconfig", self.kubeconfig, *arguments).returncode == 0

    def apply(self, *objects: Mapping[str, Any]) -> None:
        self("apply", "--filename", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def wait_for_crds(self, *names: str, timeout_seconds: float) -> None:
        """Wait until the CRDs, by default all, are served. Raises HarnessError."""
        deadline = time.monotonic() + timeout_seconds
        arguments = ("wait", "crd", *(names or ("--all",)), "--for=condition=Established", "--timeout=10s")
        while not self.succeeds(*arguments):  # it also fails for a CRD that has no conditions yet
            if time.monotonic() > deadline:
                raise HarnessError(f"CRDs not served within {timeout_seconds:.0f} s: {', '.join(names) or 'some'}")
            time.sleep(POLL_SECONDS)

    def wait_for_removals(self, *kinds: str, timeout_seconds: float) -> None:
        """Wait until no object of these kinds is being deleted. Raises HarnessError."""
        deadline = time.monotonic() + timeout_seconds
        template = "jsonpath={.items[*].metadata.deletionTimestamp}"
        while self("get", ",".join(kinds), "--output", template):
            if time.monotonic() > deadline:
                raise HarnessError(f"{', '.join(kinds)} are still being deleted after {timeout_seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def get(self, kind: str, name: str, *, namespace: str) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self("get", kind, name, "--namespace", namespace, "--output", "json"))
        return body

    def list_ready_nodes(self) -> frozenset[str]:
        template = '{range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status}{"\\n"}{end}'
        lines = self("get", "nodes", "--output", f"jsonpath={template}").split()
        return frozenset(line.removesuffix("=True") for line in lines if line.endswith("=True"))


def wait_for_api_server(server: str, *, ca_file: Path, token: str, timeout_seconds: float = 60) -> None:
    """Wait until /readyz returns 200, which implies that the start-up hooks have created the default roles."""
    context = ssl.create_default_context(cafile=str(ca_file))
    deadline = time.monotonic() + timeout_seconds
    while not is_healthy(f"{server}/readyz", token=token, context=context):
        if time.monotonic() > deadline:
            raise HarnessError(f"{server}/readyz did not return 200 within {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def is_healthy(url: str, *, token: str = "", context: ssl.SSLContext | None = None) -> bool:
    """Return whether a GET request returns 200; bypass the host's proxies, which cannot reach the cluster."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False
