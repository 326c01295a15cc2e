"""Find Helm (the pinned version, built with Go, or else the installed version) and render the chart."""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from go_programs import find_program
from testing.cluster.host.versions import PINNED

CHART = Path(__file__).resolve().parent.parent / "charts" / "finetune-operator"
RELEASE = "finetune-operator"
NAMESPACE = "finetune-system"


def find_helm() -> Path | None:
    """Return the path of Helm, or None if it is not installed and cannot be built."""
    return find_program("helm", PINNED.helm)


def list_images(documents: Iterable[Any]) -> list[str]:
    """Return the images of all containers in a rendered chart, and of the pods that the operator creates."""
    images: set[str] = set()
    nodes = list(documents)
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            images |= {node["image"]} if isinstance(node.get("image"), str) else set()
            images |= {node["value"]} if node.get("name") == "FINETUNE_TRAINER_IMAGE" else set()
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    return sorted(images)


def render_chart(
    helm: Path,
    *settings: str,
    chart: str | Path = CHART,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    has_tests: bool = True,
) -> str:
    """Return the output of `helm template`; `settings` are passed as `--set-json`.

    has_tests: whether it contains the objects of `helm test`.
    """
    options = [option for setting in settings for option in ("--set-json", setting)]
    options += [] if has_tests else ["--skip-tests"]
    command: list[str | Path] = [helm, "template", release, chart, "--namespace", namespace, *options]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
