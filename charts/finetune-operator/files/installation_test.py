"""Verifies an installation for `helm test`: the operator has to process a suspended FineTuneJob, which starts no pod.

It runs in the operator's image and uses only the standard library. Environment: JOB contains the manifest of the job,
NAMESPACE the namespace to create it in.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_SECONDS = 120
POLL_SECONDS = 2

Json = dict[str, Any]


class InstallationFailure(Exception):
    """The installation does not work; the message states what to do."""


class RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error, because urllib would send the token to the other server."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request to follow."""


def main() -> int:
    """Create the job, wait for its condition Suspended, delete it, and return the exit code."""
    url = f"{get_server()}/apis/finetune.dev/v1alpha1/namespaces/{os.environ['NAMESPACE']}/finetunejobs"
    try:
        name = send("POST", url, json.loads(os.environ["JOB"]))["metadata"]["name"]
        print(f"the API server accepted the FineTuneJob {name}")
        try:
            wait_until_suspended(f"{url}/{name}")
            print("the operator has processed it")
        finally:
            send("DELETE", f"{url}/{name}")
    except InstallationFailure as failure:
        print(failure)
        return 1
    return 0


def wait_until_suspended(url: str) -> None:
    """Wait until the operator has written the condition Suspended; raises InstallationFailure after TIMEOUT_SECONDS."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        conditions = send("GET", url).get("status", {}).get("conditions", [])
        if any(condition["type"] == "Suspended" and condition["status"] == "True" for condition in conditions):
            return
        time.sleep(POLL_SECONDS)
    raise InstallationFailure(
        f"no operator has processed the job within {TIMEOUT_SECONDS} s: read the operator's log, and check that"
        " watchNamespaces contains its namespace"
    )


def get_server() -> str:
    """Return the URL of the API server from the variables of every pod."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def send(method: str, url: str, body: Json | None = None) -> Json:
    """Send a request with the token of the service account; raises InstallationFailure if it is rejected."""
    token = (SERVICE_ACCOUNT / "token").read_text()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310  the API server
    authority = SERVICE_ACCOUNT / "ca.crt"
    context = ssl.create_default_context(cafile=authority) if url.startswith("https") else None
    try:
        opener = urllib.request.build_opener(RefuseRedirects, urllib.request.HTTPSHandler(context=context))
        with opener.open(request, timeout=30) as response:
            parsed: Json = json.load(response)
    except urllib.error.HTTPError as error:
        raise InstallationFailure(
            f"{method} {url}: {error.code}: {error.read(2000).decode(errors='replace')}"
        ) from None
    except OSError as error:
        raise InstallationFailure(f"{method} {url}: {error}") from None
    return parsed


if __name__ == "__main__":
    sys.exit(main())
