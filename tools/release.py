"""Create the files of a release: pinned chart, install.yaml, list of images, bills of materials, wheel, kubectl plugin.

The workflow .github/workflows/release.yml runs it after the images were pushed; it needs no network.
"""

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from generate import render_install
from helm import CHART, find_helm, list_images, render_chart
from lockfile import LOCKS, read_locks
from sbom import render_sbom

ROOT = CHART.parents[1]
KREW = ROOT / "integrations" / "krew"
REGISTRY = "ghcr.io/finetune-operator"
PLUGIN = "kubectl-finetune.tar.gz"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
BILLS_OF_MATERIALS = {"operator": ("operator",), "trainer": ("trainer", "torch"), "cli": ("cli",), "mcp": ("mcp",)}


@dataclass(frozen=True)
class ReleaseContent:
    """Version and contents of a release; the digests are those of the pushed images for all platforms."""

    version: str
    operator_digest: str
    trainer_digest: str
    created_at: datetime

    @property
    def images(self) -> dict[str, str]:
        """Each image with its tag, and the same image with its digest."""
        digests = {"operator": self.operator_digest, "trainer": self.trainer_digest}
        return {f"{REGISTRY}/{name}:v{self.version}": f"{REGISTRY}/{name}@{digest}" for name, digest in digests.items()}


def main() -> int:
    """Create the files in an empty folder, or print all problems and return exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", required=True, help="git tag, such as v0.1.0")
    parser.add_argument("--operator-digest", required=True, help="sha256:... of the operator's image")
    parser.add_argument("--trainer-digest", required=True, help="sha256:... of the trainer's image")
    parser.add_argument("--output", required=True, type=Path, help="folder to create")
    args = parser.parse_args()
    helm = find_helm()
    problems = [*find_version_problems(args.tag), *([] if helm else ["install helm, or Go to build it"])]
    digests = (args.operator_digest, args.trainer_digest)
    problems += [
        f"{digest}: expected sha256: and 64 hexadecimal digits" for digest in digests if not DIGEST.fullmatch(digest)
    ]
    if problems or helm is None:
        print("\n".join(problems), file=sys.stderr)
        return 1
    args.output.mkdir(parents=True)
    release = ReleaseContent(args.tag.removeprefix("v"), *digests, read_commit_time())
    write_chart(release, helm, args.output)
    write_bills_of_materials(release, args.output)
    write_kubectl_plugin(release, args.output)
    write_checksums(args.output)
    return 0


def find_version_problems(tag: str) -> Iterator[str]:
    """Yield a problem for each file with another version than the tag."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    changelog = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = {
        "pyproject.toml: project.version": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        "Chart.yaml: version": chart["version"],
        "Chart.yaml: appVersion": chart["appVersion"],
        "CHANGELOG.md: first heading": changelog.group(1) if changelog else "",
    }
    for place, version in versions.items():
        if f"v{version}" != tag:
            yield f"{place}: found {version}; the tag is {tag}"


def read_commit_time() -> datetime:
    """Return the time of the commit, so that the files of a release can be reproduced."""
    command = ("git", "log", "-1", "--format=%ct")
    seconds = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return datetime.fromtimestamp(int(seconds), UTC)


def write_chart(release: ReleaseContent, helm: Path, output: Path) -> None:
    """Package the chart with the digests of both images, and render install.yaml and images.txt from it."""
    with tempfile.TemporaryDirectory() as scratch:
        chart = Path(scratch) / CHART.name
        shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("__pycache__"))
        pin_images(chart, release)
        subprocess.run([helm, "package", chart, "--destination", output], check=True, stdout=subprocess.DEVNULL)
        rendered = render_chart(helm, chart=chart, has_tests=False)
    (output / "install.yaml").write_text(render_install(rendered))
    (output / "images.txt").write_text("".join(f"{image}\n" for image in list_images(yaml.safe_load_all(rendered))))


def pin_images(chart: Path, release: ReleaseContent) -> None:
    """Write the digests of the images to the values and the annotations of a copy of the chart."""
    operator, trainer = release.images.values()
    replace_once(
        chart / "values.yaml",
        {
            '\n  digest: ""\n': f"\n  digest: {operator.partition('@')[2]}\n",
            '\ntrainerImage: ""\n': f"\ntrainerImage: {trainer}\n",
        },
    )
    replace_once(
        chart / "Chart.yaml", {f"image: {tagged}\n": f"image: {pinned}\n" for tagged, pinned in release.images.items()}
    )


def replace_once(path: Path, replacements: Mapping[str, str]) -> None:
    """Replace texts in a file. Raises ValueError if one does not occur exactly once."""
    text = path.read_text()
    for old, new in replacements.items():
        if text.count(old) != 1:
            raise ValueError(f"{path.name}: {old.strip()!r} occurs {text.count(old)} times; expected once")
        text = text.replace(old, new)
    path.write_text(text)


def write_bills_of_materials(release: ReleaseContent, output: Path) -> None:
    """Write the Python packages of each image and of the client programs, from their lock files."""
    for name, locks in BILLS_OF_MATERIALS.items():
        text = render_sbom(f"finetune-{name}", release.version, read_locks(locks), created_at=release.created_at)
        (output / f"{name}.cdx.json").write_text(text)


def write_kubectl_plugin(release: ReleaseContent, output: Path) -> None:
    """Build the wheel, the archive of the kubectl plugin with it, and the manifest for krew."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": f"{release.created_at.timestamp():.0f}"}
    command = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", output.absolute())
    subprocess.run(command, cwd=ROOT, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (wheel,) = output.glob("*.whl")
    script = (KREW / "kubectl-finetune").read_text().replace("@VERSION@", release.version)
    archive = build_archive(
        {
            "kubectl-finetune": script.encode(),
            "cli.txt": (LOCKS / "cli.txt").read_bytes(),
            wheel.name: wheel.read_bytes(),
            "LICENSE": (ROOT / "LICENSE").read_bytes(),
        },
        release.created_at,
    )
    (output / PLUGIN).write_bytes(archive)
    manifest = (KREW / "finetune.yaml").read_text().partition("\n")[2]
    sha256 = hashlib.sha256(archive).hexdigest()
    (output / "finetune.yaml").write_text(manifest.replace("@VERSION@", release.version).replace("@SHA256@", sha256))


def build_archive(files: Mapping[str, bytes], modified_at: datetime) -> bytes:
    """Return a compressed tar archive of the files, whose bytes depend on nothing else; the first one is executable."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(content), int(modified_at.timestamp())
            entry.mode = 0o755 if name == next(iter(files)) else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def write_checksums(output: Path) -> None:
    """Write the sha256 of all files, in the format of sha256sum."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(output.iterdir())]
    (output / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    sys.exit(main())
