"""Releases between which the upgrade test switches: a commit, this tree, and this tree with edits ("next")."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError, run, stage
from testing.cluster.images.project_images import BUILD_FILES, REPOSITORY, ImageBuilder, get_image_name
from testing.upgrade.next_release import NEXT_RELEASE_EDITS

FOLDERS = ("operator", "trainer", "charts")


@dataclass(frozen=True)
class Release:
    """Source tree of one release; its images have the name of the release as their tag."""

    name: str
    tree: Path

    @property
    def chart(self) -> Path:
        return self.tree / "charts" / "finetune-operator"

    @property
    def trainer_image(self) -> str:
        return get_image_name("trainer", tag=self.name)

    def build_images(self, cache: Cache) -> list[Path]:
        builder = ImageBuilder(cache, repository=self.tree, tag=self.name)
        return [builder.build(target) for target in ("operator", "trainer")]

    def build_helm_options(self) -> tuple[str, ...]:
        repository, _, tag = get_image_name("operator", tag=self.name).rpartition(":")
        values = {
            "image.repository": repository,
            "image.tag": tag,
            "image.pullPolicy": "Never",
            "trainerImage": self.trainer_image,
        }
        return tuple(word for key, value in values.items() for word in ("--set-string", f"{key}={value}"))


def create_releases(cache: Cache, *, previous_commit: str) -> dict[str, Release]:
    """Write the source trees of the three releases below the cache folder, and return them by name."""
    folder = cache.root / "upgrade"
    shutil.rmtree(folder, ignore_errors=True)
    previous, this, following = (Release(name, folder / name) for name in ("previous", "this", "next"))
    with stage(f"write the source trees of {previous_commit}, this tree and the next release"):
        _extract_commit(previous_commit, previous.tree)
        # with the same dependencies, only the layer of the code differs between the images
        _copy_build_files(previous.tree)
        write_this_release(this.tree)
        write_next_release(following.tree)
    return {release.name: release for release in (previous, this, following)}


def _extract_commit(commit: str, tree: Path) -> None:
    tree.mkdir(parents=True)
    archive = subprocess.run(
        ("git", "-C", str(REPOSITORY), "archive", commit, "--", *FOLDERS),
        capture_output=True,
        check=False,
    )
    if archive.returncode:
        reason = archive.stderr.decode(errors="replace").strip()
        raise HarnessError(f"--previous {commit}: git cannot read this commit ({reason}); fetch the whole history")
    subprocess.run(("tar", "--extract", "--directory", str(tree)), input=archive.stdout, check=True)


def write_this_release(tree: Path) -> None:
    """Copy the files of the working tree that make a release."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (*FOLDERS, "tools", "manifests", "docs", "integrations"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=ignore)
    _copy_build_files(tree)


def _copy_build_files(tree: Path) -> None:
    shutil.copytree(REPOSITORY / "requirements", tree / "requirements")
    for name in BUILD_FILES:
        shutil.copy(REPOSITORY / name, tree / name)


def write_next_release(tree: Path) -> None:
    """Copy the working tree, apply NEXT_RELEASE_EDITS and generate the CRD again."""
    write_this_release(tree)
    for name, text, replacement in NEXT_RELEASE_EDITS:
        path = tree / name
        source = path.read_text()
        assert source.count(text) == 1, f"{name} contains {text!r} {source.count(text)} times; adapt the edit"
        path.write_text(source.replace(text, replacement))
    paths = ":".join(map(str, (*(tree / folder for folder in ("operator", "trainer", "tools")), REPOSITORY)))
    run(sys.executable, tree / "tools" / "generate.py", environment={"PYTHONPATH": paths})
