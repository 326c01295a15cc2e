"""Tests of the manifests that `make bench-recovery` installs and of the statistics that it prints."""

from pathlib import Path

import yaml

from benchmarks.kubeflow.managers import JOBSET
from benchmarks.recovery.stages import (
    RECOVERED,
    StageTimes,
    append_stage_seconds,
    compute_stage_seconds,
    summarise_figures,
)
from testing.cluster.controller_managers import adapt_configuration, adapt_manifests, read_upstream_manifests

UPSTREAM = """
apiVersion: v1
kind: ConfigMap
metadata: {name: jobset-manager-config, namespace: jobset-system}
data:
  controller_manager_config.yaml: |
    kind: Configuration
    leaderElection: {leaderElect: true, resourceName: jobset}
    internalCertManagement: {enable: true}
---
apiVersion: v1
kind: Service
metadata: {name: jobset-webhook-service, namespace: jobset-system}
spec: {ports: [{port: 443}], selector: {control-plane: controller-manager}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: jobset-controller-manager, namespace: jobset-system}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata: {name: jobset-mutating-webhook-configuration}
webhooks:
- {name: mjobset.kb.io, clientConfig: {service: {name: jobset-webhook-service, namespace: jobset-system, path: /m}}}
"""


def test_webhooks_connect_to_local_process_instead_of_deployment(tmp_path: Path) -> None:
    (tmp_path / "documents.yaml").write_text(UPSTREAM)

    config_map, service, webhooks = adapt_manifests(JOBSET, read_upstream_manifests(tmp_path))

    assert config_map["kind"] == "ConfigMap"
    assert service["spec"] == {"type": "ExternalName", "externalName": "localhost"}
    expected = yaml.safe_load(UPSTREAM.split("---")[-1])["webhooks"][0]["clientConfig"]["service"]
    assert webhooks["webhooks"][0]["clientConfig"]["service"] == {**expected, "port": 9443}


def test_managers_have_upstream_configuration_with_ports_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "documents.yaml").write_text(UPSTREAM)

    configuration = adapt_configuration(JOBSET, read_upstream_manifests(tmp_path))

    assert configuration == {
        "kind": "Configuration",
        "internalCertManagement": {"enable": True},
        "leaderElection": {"leaderElect": False, "resourceName": "jobset"},
        "webhook": {"port": 9443},
        "health": {"healthProbeBindAddress": "127.0.0.1:9444"},
        "metrics": {"bindAddress": "0"},
    }


def test_stages_are_listed_in_chronological_order() -> None:
    logged_at = {"imported": 1004.0, "joined": 1004.5, "step 1": 1006.25}

    stages = compute_stage_seconds(
        RECOVERED, 1000.0, StageTimes(created_at=1001.5, running_at=1002.0, logged_at=logged_at, stopped_at=1001.0)
    )

    assert list(stages.values()) == [6.25, 1.0, 1.5, 2.0, 4.0, 4.5]
    assert next(iter(stages)) == RECOVERED
    assert "  until the operator stopped the attempt" not in compute_stage_seconds(
        RECOVERED, 1000.0, StageTimes(1001.5, 1002.0, logged_at)
    )


def test_peer_measurements_are_summarised_by_median_and_range() -> None:
    figures: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    for seconds in (11.0, 14.5, 9.9):
        append_stage_seconds(figures, ({}, {RECOVERED: seconds}))

    assert summarise_figures(figures[1]) == {RECOVERED: "11.000 (9.900 to 14.500)"}
