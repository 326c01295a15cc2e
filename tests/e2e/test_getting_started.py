"""Test that follows the steps of docs/getting-started.md."""

from pathlib import Path

import pytest
import yaml

from testing.cluster.images.project_images import get_image_name
from testing.models import tiny_text
from testing.processes.operator_stack import OperatorInstallation, has_condition

pytestmark = pytest.mark.cluster

MANIFESTS = Path(__file__).parents[2] / "manifests" / "getting-started"


def test_job_trains_on_copied_data(deployment: OperatorInstallation, job_name: str, tmp_path: Path) -> None:
    tiny_text.build(tmp_path / "data", rows=40, eval_rows=4)
    [loader] = [body for body in yaml.safe_load_all((MANIFESTS / "claims.yaml").read_text()) if body["kind"] == "Pod"]
    container = loader["spec"]["containers"][0]
    container |= {
        "image": get_image_name("trainer"),
        "imagePullPolicy": "Never",
    }  # the test cluster cannot reach a registry
    deployment.apply(loader)
    job = yaml.safe_load((MANIFESTS / "job.yaml").read_text())
    job["metadata"]["name"] = job_name  # unique, because outputs of earlier runs remain in the claim
    job["spec"]["numNodes"] = 1  # test_documented_commands runs the job on two nodes
    try:
        deployment.kubectl("wait", "--for=condition=Ready", "pod/data-loader", "--timeout=60s")
        deployment.kubectl("cp", str(tmp_path / "data"), "data-loader:/data/quickstart")

        deployment.apply(job)
        finished = deployment.wait_until_finished(job_name)
    finally:
        deployment.kubectl("delete", "pod", "data-loader", "--now")
        deployment.delete(job_name)

    assert has_condition(finished, "Complete"), finished["status"]
    assert (deployment.get_output_folder(job_name) / "result" / "adapter_model.safetensors").is_file()
