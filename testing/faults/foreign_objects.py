"""Objects with which another tenant of the namespace interferes with a job."""

from __future__ import annotations

from typing import Any

from finetune_operator import names
from testing.cluster.images.project_images import get_image_name

RawBody = dict[str, Any]
DEEP_LEVELS = 9_000  # the API server accepts 10,000

FORGED_STATUS = """
import http.server, json, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"namespace": "finetune-jobs", "job": os.environ["JOB"], "uid": os.environ["JOB_UID"],
                           "attempt": 0, "progress": {"step": 10**9, "totalSteps": 10**9}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("", 8080), Handler).serve_forever()
"""


def build_decoy_pod(job: RawBody) -> RawBody:
    """Return a pod with the labels of the job's node 0, which reports progress of the job."""
    metadata = job["metadata"]
    labels = {
        names.JOB_NAME: metadata["name"],
        names.JOB_UID: metadata["uid"],
        names.ATTEMPT: "0",
        names.NODE_RANK: "0",
    }
    container = {
        "name": names.CONTAINER,
        "image": get_image_name("operator"),
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", FORGED_STATUS],
        "env": [{"name": "JOB", "value": metadata["name"]}, {"name": "JOB_UID", "value": metadata["uid"]}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"decoy-{metadata['name']}", "labels": labels},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": names.USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        },
    }


def build_forged_config_map(genuine: RawBody, name: str, **data: str) -> RawBody:
    """Return a ConfigMap with the labels and ownerReferences of a genuine one, and with some other data."""
    metadata = {
        "name": name,
        "labels": genuine["metadata"]["labels"],
        "ownerReferences": genuine["metadata"]["ownerReferences"],
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {**genuine["data"], **data}}
