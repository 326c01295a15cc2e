"""Generate files from the models and the chart; with `--check`, only report outdated files."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from chart_values import render_values_reference
from crd import build_crd, build_json_schema
from dashboards import DASHBOARDS, render_dashboard
from field_reference import render_reference
from finetune_api.v1alpha1.job import GROUP, KIND
from finetune_operator.failures.guide import render_failure_guide
from free_strings import render_free_strings
from helm import CHART, NAMESPACE, find_helm, list_images, render_chart

ROOT = Path(__file__).resolve().parent.parent
NOTE = "Generated from operator/finetune_api by `make generate`; do not edit."
GUIDE_NOTE = "Generated from v1alpha1/reasons.py and the operator's limits by `make generate`; do not edit."
STRINGS_NOTE = "Generated from the CRD and tools/free_strings.yaml by `make generate`; do not edit."
VALUES_NOTE = "Generated from charts/finetune-operator/values.yaml by `make generate`; do not edit."
ARGO_NOTE = "Generated from integrations/argocd by `make generate`; do not edit."
INSTALL_NOTE = "Generated from charts/finetune-operator by `make generate`; do not edit."
HELM_ONLY = ("helm.sh/chart", "helm.sh/resource-policy", "app.kubernetes.io/managed-by")


def main() -> int:
    """Generate or check all files; return exit code 1 if `--check` found an outdated file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args().check
    outdated = sum(write_if_changed(ROOT / path, text, check_only=check) for path, text in render_from_models().items())
    helm = find_helm()
    if helm is None:
        print("SKIPPED install.yaml and images.txt: they are rendered by helm; install helm, or Go to build it")
    else:
        # these files are rendered last, because the chart contains one of the other files
        for path, text in render_from_chart(helm).items():
            outdated += write_if_changed(ROOT / path, text, check_only=check)
    return 1 if check and outdated else 0


def write_if_changed(path: Path, text: str, *, check_only: bool) -> bool:
    """Write the file unless `check_only` is set; return whether its content was outdated."""
    if path.exists() and path.read_text() == text:
        return False
    name = path.relative_to(ROOT)
    print(f"{name} is out of date; run `make generate`" if check_only else f"wrote {name}")
    if not check_only:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return True


def render_from_models() -> dict[Path, str]:
    """Return the content of all files generated from the models and rules, by path relative to the root."""
    crd = build_crd()
    chart_crd = {**crd, "metadata": {**crd["metadata"], "annotations": {"helm.sh/resource-policy": "keep"}}}
    schema = json.dumps({"$comment": NOTE, **build_json_schema()}, indent=1, ensure_ascii=False)
    return {
        Path("manifests/crd/finetunejobs.yaml"): f"# {NOTE}\n{dump_yaml(crd)}",
        Path("charts/finetune-operator/files/finetunejobs.yaml"): f"# {NOTE}\n{dump_yaml(chart_crd)}",
        Path("manifests/finetunejob.schema.json"): schema.replace("{\n", "{", 1) + "\n",
        Path("docs/reference/finetunejob.md"): f"<!-- {NOTE} -->\n{render_reference()}",
        Path("docs/reference/free-strings.md"): f"<!-- {STRINGS_NOTE} -->\n{render_free_strings()}",
        Path("docs/reference/helm-values.md"): f"<!-- {VALUES_NOTE} -->\n{render_values_reference(CHART)}",
        Path("docs/reference/failures.md"): f"<!-- {GUIDE_NOTE} -->\n{render_failure_guide()}",
        **{
            Path(f"charts/finetune-operator/files/dashboards/{name}.json"): render_dashboard(dashboard)
            for name, dashboard in DASHBOARDS.items()
        },
        Path(
            "manifests/argocd-cm.yaml"
        ): f"# {ARGO_NOTE}\n{dump_yaml(build_argo_settings(ROOT / 'integrations/argocd'))}",
    }


def build_argo_settings(folder: Path) -> dict[str, Any]:
    """Return a ConfigMap with the settings of Argo CD for FineTuneJobs, from the Lua programs in the folder."""
    actions = {
        "discovery.lua": (folder / "actions/discovery.lua").read_text(),
        "definitions": [
            {"name": name, "action.lua": (folder / f"actions/{name}.lua").read_text()}
            for name in ("suspend", "resume", "cancel")
        ],
    }
    customizations = "resource.customizations"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "argocd-cm", "labels": {"app.kubernetes.io/part-of": "argocd"}},
        "data": {
            f"{customizations}.health.{GROUP}_{KIND}": (folder / "health.lua").read_text(),
            f"{customizations}.actions.{GROUP}_{KIND}": dump_yaml(actions),
        },
    }


def render_from_chart(helm: Path) -> dict[Path, str]:
    """Return the content of all files that are rendered from the chart, by path relative to the root."""
    rendered_chart = render_chart(helm, has_tests=False)
    images = "".join(f"{image}\n" for image in list_images(yaml.safe_load_all(rendered_chart)))
    return {
        Path("manifests/install.yaml"): render_install(rendered_chart),
        Path("manifests/images.txt"): images,
    }


def render_install(rendered_chart: str) -> str:
    """Convert the rendered chart for `kubectl apply`: add the namespace, and remove Helm's labels and annotations."""
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }
    documents = [namespace, *(document for document in yaml.safe_load_all(rendered_chart) if document)]
    return f"# {INSTALL_NOTE}\n" + "---\n".join(dump_yaml(remove_helm_metadata(document)) for document in documents)


def remove_helm_metadata(node: Any) -> Any:
    """Return the document without Helm's labels and annotations."""
    if isinstance(node, list):
        return [remove_helm_metadata(item) for item in node]
    if not isinstance(node, dict):
        return node
    remaining = {key: remove_helm_metadata(value) for key, value in node.items() if key not in HELM_ONLY}
    return {key: value for key, value in remaining.items() if key != "annotations" or value}


class _PlainDumper(yaml.SafeDumper):
    """YAML dumper without aliases, which make diffs hard to read, and with literal blocks for multi-line texts."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 (PyYAML's signature)
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_PlainDumper.add_representer(str, _PlainDumper.represent_str)


def dump_yaml(document: object) -> str:
    """Format a document as YAML and keep the order of its keys."""
    return yaml.dump(document, Dumper=_PlainDumper, sort_keys=False, width=110, allow_unicode=True)


if __name__ == "__main__":
    sys.exit(main())
