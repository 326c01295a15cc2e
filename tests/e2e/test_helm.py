"""Test of running jobs during install, upgrade and uninstall of the chart."""

from collections.abc import Callable

import pytest

from testing.processes.cluster_training import build_training_fields, wait_for_checkpoint
from testing.processes.operator_stack import (
    CHART,
    OPERATOR_NAMESPACE,
    OperatorInstallation,
    build_helm_options,
    has_condition,
)

pytestmark = pytest.mark.cluster


def test_running_job_survives_upgrade_and_uninstall_of_the_chart(
    deployment: OperatorInstallation, start_job: Callable[..., str]
) -> None:
    job = start_job(training=build_training_fields(max_steps=120, save_steps=20))
    wait_for_checkpoint(deployment, job)

    options = ("--namespace", OPERATOR_NAMESPACE)
    deployment.helm("uninstall", "finetune-operator", *options, "--wait")
    assert deployment.get_job(job)["spec"]["numNodes"] == 2
    assert len(deployment.list_pods(job)) == 2, "pods must keep running without the operator"

    deployment.helm(
        "install", "finetune-operator", str(CHART), *options, "--wait", "--timeout", "120s", *build_helm_options()
    )
    deployment.helm(
        "upgrade", "finetune-operator", str(CHART), *options, "--wait", "--set", "replicas=1", *build_helm_options()
    )
    finished = deployment.wait_until_finished(job)
    assert has_condition(finished, "Complete")
    assert finished["status"].get("restarts", 0) == 0

    deployment.install_operator()
