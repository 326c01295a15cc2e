"""Write what is made from the models and the chart. `--check` only says what is out of date."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from finetune_api.schema.crd import build_crd, build_json_schema
from finetune_api.schema.reference import render_reference
from finetune_operator.failures.guide import render_failure_guide
from helm import NAMESPACE, find_helm, render_chart

ROOT = Path(__file__).resolve().parent.parent
NOTE = "Generated from operator/finetune_api by `make generate`; do not edit."
GUIDE_NOTE = (
    "Generated from finetune_api/v1alpha1/reasons.py and the operator's limits by `make generate`; do not edit."
)
INSTALL_NOTE = "Generated from charts/finetune-operator by `make generate`; do not edit."
HELM_ONLY = ("helm.sh/chart", "helm.sh/resource-policy", "app.kubernetes.io/managed-by")


def main() -> int:
    """Exit code 1 if --check found a file that is not what its source says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args().check
    stale = sum(replace(ROOT / path, text, check=check) for path, text in render_from_models().items())
    helm = find_helm()
    if helm is None:
        print("SKIPPED manifests/install.yaml: it is rendered by helm; install helm, or Go to build it")
    else:
        # after the files above: the chart holds one of them
        stale += replace(ROOT / "manifests/install.yaml", render_install(render_chart(helm)), check=check)
    return 1 if check and stale else 0


def replace(path: Path, text: str, *, check: bool) -> bool:
    """True if the file was not what it should be."""
    if path.exists() and path.read_text() == text:
        return False
    shown = path.relative_to(ROOT)
    print(f"{shown} is out of date; run `make generate`" if check else f"wrote {shown}")
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return True


def render_from_models() -> dict[Path, str]:
    """Every file that is made from the models and rules, by its path from the root."""
    crd = build_crd()
    kept = {**crd, "metadata": {**crd["metadata"], "annotations": {"helm.sh/resource-policy": "keep"}}}
    schema = json.dumps({"$comment": NOTE, **build_json_schema()}, indent=1, ensure_ascii=False)
    return {
        Path("manifests/crd/finetunejobs.yaml"): f"# {NOTE}\n{dump_yaml(crd)}",
        Path("charts/finetune-operator/files/finetunejobs.yaml"): f"# {NOTE}\n{dump_yaml(kept)}",
        Path("manifests/finetunejob.schema.json"): schema.replace("{\n", "{", 1) + "\n",
        Path("docs/reference/finetunejob.md"): f"<!-- {NOTE} -->\n{render_reference()}",
        Path("docs/reference/failures.md"): f"<!-- {GUIDE_NOTE} -->\n{render_failure_guide()}",
    }


def render_install(rendered: str) -> str:
    """The chart with its own namespace and without Helm's marks, for `kubectl apply`."""
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }
    documents = [namespace, *(document for document in yaml.safe_load_all(rendered) if document)]
    return f"# {INSTALL_NOTE}\n" + "---\n".join(dump_yaml(without_helm(document)) for document in documents)


def without_helm(node: Any) -> Any:
    """The document without labels and annotations that only mean something to Helm."""
    if isinstance(node, list):
        return [without_helm(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: without_helm(value) for key, value in node.items() if key not in HELM_ONLY}
    return {key: value for key, value in kept.items() if key != "annotations" or value}


class _PlainDumper(yaml.SafeDumper):
    """Writes what is the same twice out twice: anchors are hard on readers of a diff."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 (PyYAML's signature)
        return True


def dump_yaml(document: object) -> str:
    """YAML in the order of the document."""
    return yaml.dump(document, Dumper=_PlainDumper, sort_keys=False, width=110, allow_unicode=True)


if __name__ == "__main__":
    sys.exit(main())
