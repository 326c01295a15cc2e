"""Test of running jobs during install, upgrade and uninstall of the chart."""

import re
from collections.abc import Callable

import pytest
import yaml

from testing.faults.training_job import request_finish, wait_for_save
from testing.processes.operator_stack import (
    CHART,
    OPERATOR_NAMESPACE,
    OperatorInstallation,
    build_helm_options,
    has_condition,
)

pytestmark = [pytest.mark.cluster, pytest.mark.alone]


@pytest.mark.versions
def test_running_job_survives_upgrade_and_uninstall_of_the_chart(
    deployment: OperatorInstallation, start_training_program: Callable[[], str]
) -> None:
    job = start_training_program()
    wait_for_save(deployment, job)

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
    request_finish(deployment, job)
    finished = deployment.wait_until_finished(job)
    assert has_condition(finished, "Complete")
    assert finished["status"].get("restarts", 0) == 0

    deployment.install_operator()


def test_helm_test_succeeds_and_leaves_only_its_pod(deployment: OperatorInstallation) -> None:
    options = ("--namespace", OPERATOR_NAMESPACE)

    output = deployment.helm("test", "finetune-operator", *options, "--logs", "--timeout", "180s")

    assert "the operator has processed it" in output
    selector = "app.kubernetes.io/name=finetune-operator-test"
    kinds = "serviceaccounts,roles,rolebindings"
    assert deployment.kubectl("get", kinds, "--namespace", OPERATOR_NAMESPACE, "-l", selector, "-o", "name") == ""
    assert deployment.kubectl("get", "ftj", "--namespace", OPERATOR_NAMESPACE, "-o", "name") == ""


def dry_run_second_release(deployment: OperatorInstallation, *settings: str) -> str:
    options = ("--namespace", "other", "--dry-run=server", "--set-json", "installCRD=false")
    return deployment.helm(
        "install", "second", str(CHART), *options, *(word for setting in settings for word in ("--set-json", setting))
    )


def test_release_that_overlaps_with_another_one_is_rejected(deployment: OperatorInstallation) -> None:
    labels = {"app.kubernetes.io/name": "finetune-operator", "app.kubernetes.io/instance": "third"}
    third = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "third-finetune-operator", "labels": labels},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "third-finetune-operator"},
        "subjects": [{"kind": "ServiceAccount", "name": "third-finetune-operator", "namespace": "third"}],
    }
    first_message = "finetune-operator in namespace finetune-system (all namespaces)"
    third_message = f"third in namespace third ({deployment.namespace})"
    deployment.apply(third)
    try:
        with pytest.raises(RuntimeError, match=re.escape(f"namespaces: {first_message}, {third_message};")):
            dry_run_second_release(deployment)
        with pytest.raises(RuntimeError, match=re.escape(f"namespaces: {first_message}, {third_message};")):
            dry_run_second_release(deployment, f'watchNamespaces=["{deployment.namespace}"]')
        with pytest.raises(RuntimeError, match=re.escape(f"namespaces: {first_message};")):
            dry_run_second_release(deployment, 'watchNamespaces=["default"]')
    finally:
        deployment.kubectl("delete", "-f", "-", stdin=yaml.safe_dump(third))

    assert "kind: Deployment" in dry_run_second_release(deployment, "overlapCheck=false")
