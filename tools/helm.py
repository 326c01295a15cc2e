"""Find Helm (the pinned version, built with Go, or else the installed version) and render the chart."""

import shutil
import subprocess
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.versions import PINNED
from testing.cluster.images.go_build import build_all

CHART = Path(__file__).resolve().parent.parent / "charts" / "finetune-operator"
NAMESPACE = "finetune-system"


def find_helm() -> Path | None:
    """Return the path of Helm, or None if it is not installed and cannot be built; the first build takes minutes."""
    pinned = Cache.from_environment().get_binary_folder("helm", PINNED.helm) / "helm"
    if not pinned.exists() and shutil.which("go"):
        build_all(Cache.from_environment(), PINNED, component_names=("helm",))
    if pinned.exists():
        return pinned
    installed = shutil.which("helm")
    return Path(installed) if installed else None


def render_chart(helm: Path, *settings: str) -> str:
    """Return the output of `helm template`; `settings` are passed as `--set-json`."""
    options = [option for setting in settings for option in ("--set-json", setting)]
    command: list[str | Path] = [helm, "template", "finetune-operator", CHART, "--namespace", NAMESPACE, *options]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
