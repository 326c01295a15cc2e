"""Is everything that users apply what an API server takes? The chart as rendered, install.yaml, CRD, examples."""

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
    "some namespaces": ('watchNamespaces=["a","b"]', "installCRD=false", "userRoles=false"),
    "everything": (
        "replicas=1",
        'imagePullSecrets=[{"name":"registry"}]',
        'nodeSelector={"kubernetes.io/os":"linux"}',
        'tolerations=[{"key":"control-plane","operator":"Exists"}]',
        'priorityClassName="system-cluster-critical"',
        'extraArgs=["--log-level=debug"]',
        'podMonitor={"enabled":true,"labels":{"release":"prometheus"}}',
        'networkPolicy={"enabled":true,"namespaces":["a","b"],"metricsFrom":[{"namespaceSelector":{}}]}',
    ),
}
OTHERS_KINDS = ("PodMonitor",)  # of operators that Kubernetes knows nothing of


def main() -> int:
    """Exit code 1 if there is a problem anywhere."""
    problems = list(example_problems())
    schema = load_kubernetes_schema()
    if schema is None:
        print("SKIPPED the check against Kubernetes' API: its schema is in a Go module, and Go is not installed")
    else:
        problems += kubernetes_problems(schema)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def example_problems() -> Iterator[str]:
    """Each example against the schema for editors, and as the command line reads it."""
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


def kubernetes_problems(schema: KubernetesSchema) -> Iterator[str]:
    """What Kubernetes' own schema says of the CRD, install.yaml and the rendered chart."""
    for path in (MANIFESTS / "crd" / "finetunejobs.yaml", MANIFESTS / "install.yaml"):
        yield from _problems(schema, path.name, yaml.safe_load_all(path.read_text()))
    helm = find_helm()
    if helm is None:
        print("SKIPPED rendering the chart: there is neither helm nor Go to build it")
        return
    for name, settings in CHART_SETTINGS.items():
        documents = list(yaml.safe_load_all(render_chart(helm, *settings)))
        yield from _problems(schema, f"chart ({name})", documents)


def _problems(schema: KubernetesSchema, where: str, documents: Iterable[Schema | None]) -> Iterator[str]:
    for document in documents:
        if document and document["kind"] not in OTHERS_KINDS:
            yield from (f"{where}: {problem}" for problem in schema.problems(document))


if __name__ == "__main__":
    sys.exit(main())
