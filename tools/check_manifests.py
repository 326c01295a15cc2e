"""Check examples, CRD, install.yaml and the rendered chart against the schemas of the API server."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator

from finetune_cli.errors import BadInput
from finetune_cli.job_file import read_job_file
from helm import find_helm, render_chart
from kubernetes_schema import KubernetesSchema, Schema, load_kubernetes_schema

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = ROOT / "manifests"
CHART_SETTINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "watched namespaces": ('watchNamespaces=["a","b"]', "installCRD=false", "userRoles=false"),
    "all options": (
        "replicas=1",
        'imagePullSecrets=[{"name":"registry"}]',
        'nodeSelector={"kubernetes.io/os":"linux"}',
        'tolerations=[{"key":"control-plane","operator":"Exists"}]',
        'priorityClassName="system-cluster-critical"',
        'extraArgs=["--log-level=debug"]',
        'defaults={"ttlSecondsAfterFinished":2592000}',
        'notifications={"url":"https://sink.example/events","secretName":"sink"}',
        'podMonitor={"enabled":true,"labels":{"release":"prometheus"}}',
        'prometheusRule={"enabled":true,"labels":{"release":"prometheus"}}',
        'dashboards={"enabled":true,"annotations":{"grafana_folder":"Training"}}',
        'networkPolicy={"enabled":true,"namespaces":["a","b"],"metricsFrom":[{"namespaceSelector":{}}]}',
        'admissionPolicies={"operator":{"enabled":true},"jobs":{"maxGpus":8,"images":["registry.example/*"],'
        '"requiredPodLabels":[{"name":"queue"}]}}',
    ),
}
THIRD_PARTY_KINDS = ("PodMonitor", "PrometheusRule")  # kinds that the schema of Kubernetes does not contain


def main() -> int:
    """Print all problems and return exit code 1 if there are any."""
    problems = list(find_example_problems())
    schema = load_kubernetes_schema()
    if schema is None:
        print("SKIPPED the check against the Kubernetes API: its schema is in a Go module, and Go is not installed")
    else:
        problems += find_kubernetes_problems(schema)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def find_example_problems() -> Iterator[str]:
    """Yield each problem that the editor's JSON schema or the CLI detects in an example."""
    validator = Draft202012Validator(json.loads((MANIFESTS / "finetunejob.schema.json").read_text()))
    paths = sorted((MANIFESTS / "examples").glob("*.yaml"))
    if not paths:
        yield f"{MANIFESTS / 'examples'}: no examples"
    for path in paths:
        job = yaml.safe_load(path.read_text())
        for error in validator.iter_errors(job):
            yield f"{path.name}: {'.'.join(str(part) for part in error.path)}: {error.message}"
        try:
            read_job_file(path)
        except BadInput as error:
            yield str(error)


def find_kubernetes_problems(schema: KubernetesSchema) -> Iterator[str]:
    """Yield each violation of the Kubernetes schema in the CRD, install.yaml and the rendered chart."""
    for path in (MANIFESTS / "crd" / "finetunejobs.yaml", MANIFESTS / "install.yaml"):
        yield from _find_problems(schema, path.name, yaml.safe_load_all(path.read_text()))
    helm = find_helm()
    if helm is None:
        print("SKIPPED rendering the chart: neither helm nor Go to build it is installed")
        return
    for name, settings in CHART_SETTINGS.items():
        documents = list(yaml.safe_load_all(render_chart(helm, *settings)))
        yield from _find_problems(schema, f"chart ({name})", documents)


def _find_problems(schema: KubernetesSchema, source: str, documents: Iterable[Schema | None]) -> Iterator[str]:
    for document in documents:
        if document and document["kind"] not in THIRD_PARTY_KINDS:
            yield from (f"{source}: {problem}" for problem in schema.find_problems(document))


if __name__ == "__main__":
    sys.exit(main())
