"""Tests of the objects that the memory benchmark serves to the operator."""

import json

from benchmarks.memory import put_job
from benchmarks.rig import NAMESPACE
from testing.fakes.http_api import HttpApi


def test_finished_and_running_jobs_have_the_status_and_pods_that_the_operator_writes() -> None:
    api = HttpApi()
    for name, phase, pod_phase in (("a", "Complete", "Succeeded"), ("b", "Running", "Running")):
        put_job(api, name, is_finished=phase == "Complete")
        assert api.objects["finetunejobs", NAMESPACE, name]["status"]["phase"] == phase
        pods = [api.objects["pods", NAMESPACE, f"{name}-0-{rank}"] for rank in range(2)]
        assert [pod["status"]["phase"] for pod in pods] == [pod_phase] * 2
        assert all(7000 < len(json.dumps(pod, separators=(",", ":"))) < 8000 for pod in pods), "as on a real cluster"
