"""Tests of the alerts of the chart with promtool."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from check_docs import REPOSITORY, ROOT, list_anchors
from helm import CHART, find_helm, render_chart

RULES_FILE = CHART / "files" / "alerts.yaml"
TEST_FILE = Path(__file__).with_name("alerts_test.yaml")
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]
]
SEVERITIES = ("critical", "warning", "info")


def run_promtool(promtool: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)


def test_alerts_of_the_rendered_chart_are_valid(promtool: Path, tmp_path: Path) -> None:
    helm = find_helm()
    if helm is None:
        pytest.skip("neither helm nor Go to build it is installed")
    settings = ("installCRD=false", 'prometheusRule={"enabled":true,"labels":{"release":"p"}}')
    documents = yaml.safe_load_all(render_chart(helm, *settings))
    (rule,) = (document for document in documents if document and document["kind"] == "PrometheusRule")
    rules_file = tmp_path / "rules.yaml"
    rules_file.write_text(yaml.safe_dump(rule["spec"]))

    result = run_promtool(promtool, "check", "rules", "--lint=all", "--lint-fatal", rules_file)

    assert result.returncode == 0, result.stderr
    assert f"{len(RULES)} rules found" in result.stdout
    assert rule["metadata"]["labels"]["release"] == "p"
    assert rule["spec"] == yaml.safe_load(RULES_FILE.read_text())


def test_alerts_fire_when_they_should_and_only_then(promtool: Path) -> None:
    result = run_promtool(promtool, "test", "rules", TEST_FILE)

    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_detects_an_alert_with_another_threshold(promtool: Path, tmp_path: Path) -> None:
    changed = RULES_FILE.read_text().replace("since_timestamp_seconds > 3600", "since_timestamp_seconds > 360000")
    (tmp_path / "alerts.yaml").write_text(changed)
    tests = yaml.safe_load(TEST_FILE.read_text())
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({**tests, "rule_files": ["alerts.yaml"]}))

    result = run_promtool(promtool, "test", "rules", tmp_path / "test.yaml")

    assert result.returncode == 1
    assert "FineTuneJobWaiting" in result.stdout + result.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [
        case for test in yaml.safe_load(TEST_FILE.read_text())["tests"] for case in test.get("promql_expr_test", ())
    ]
    fires = {(re.findall('alertname="([A-Za-z]+)"', case["expr"])[0], bool(case["exp_samples"])) for case in cases}

    assert fires == {(rule["alert"], outcome) for rule in RULES for outcome in (True, False)}
    assert len(RULES) >= 12


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_has_a_severity_texts_and_a_runbook_that_exists(rule: dict[str, Any]) -> None:
    annotations = rule["annotations"]
    page, _, anchor = annotations["runbook_url"].partition("#")

    assert rule["labels"]["severity"] in SEVERITIES
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert REPOSITORY.match(page)
    path = ROOT / REPOSITORY.sub("", page)
    assert path.exists()
    assert anchor in list_anchors(path)


def test_alerts_are_disabled_by_default() -> None:
    """The resource PrometheusRule may be missing in the cluster."""
    helm = find_helm()
    if helm is None:
        pytest.skip("neither helm nor Go to build it is installed")

    kinds = {document["kind"] for document in yaml.safe_load_all(render_chart(helm, "installCRD=false")) if document}

    assert "PrometheusRule" not in kinds
    assert not any(kind == "ConfigMap" for kind in kinds)
