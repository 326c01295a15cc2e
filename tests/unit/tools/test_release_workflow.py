"""Tests of the workflow that publishes a release; its scripts run with programs that record their arguments."""

import hashlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from environment import ROOT
from go_programs import find_program
from testing.cluster.host.versions import ACTIONLINT

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
JOBS: dict[str, dict[str, Any]] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
STEPS: list[dict[str, Any]] = JOBS["publish"]["steps"]
COMMIT = "${{ needs.verify.outputs.commit }}"
TAG = "v0.1.0"
REGISTRY = "registry.example"
AMD64, ARM64 = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
DIGESTS = {
    f"{name}_{platform}": digest
    for name in ("OPERATOR", "TRAINER")
    for platform, digest in (("AMD64", AMD64), ("ARM64", ARM64))
}
INDEX = '{\n   "manifests": []\n}'
# records its arguments in the file $CALLS, prints an index or a digest, and rejects an image with an empty digest
PROGRAM = """#!/bin/bash
echo "${0##*/} $*" >> "$CALLS"
case "$* " in
*"@ "*) exit 1 ;;
*--dry-run*) printf '%s\\n' "$INDEX" ;;
push*) printf "$PUSHED" >&2 ;;
esac
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


def get_script(name: str) -> str:
    (script,) = (step["run"] for step in STEPS if step.get("name") == name)
    return str(script)


def git(folder: Path, *arguments: str | Path) -> str:
    command = ("git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@example.com", *arguments)
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def commit_to(folder: Path, message: str) -> str:
    """Add a commit to a repository, which is created if it does not exist, and return its id."""
    folder.mkdir(exist_ok=True)
    git(folder, "init", "--quiet")
    git(folder, "commit", "--quiet", "--allow-empty", f"--message={message}")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Return the file with one line for each call of a program."""
    path = tmp_path / "calls"
    path.touch()
    return path


@pytest.fixture
def run_script(tmp_path: Path, calls: Path) -> Run:
    """Return a function that runs a script as the workflow does; its `variables` are those of the step."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("docker", "cosign", "helm"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)

    def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HELM": "helm",
            "CALLS": str(calls),
            "GITHUB_ENV": str(tmp_path / "environment"),
            "REGISTRY": REGISTRY,
            "TAG": TAG,
            **variables,
        }
        command = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script)
        return subprocess.run(command, cwd=tmp_path, env=environment, check=False, text=True, capture_output=True)

    return run


def test_workflow_uses_actions_by_commit_only() -> None:
    actions = re.findall(r"uses: (\S+)", WORKFLOW.read_text())

    assert len(actions) == 3
    assert [action for action in actions if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == []


def test_workflow_takes_all_foreign_images_by_digest_as_required_inputs() -> None:
    inputs = yaml.safe_load(WORKFLOW.read_text().replace("\non:", "\ntriggers:"))["triggers"]["workflow_dispatch"][
        "inputs"
    ]

    required = {name for name, each in inputs.items() if each["required"]}
    assert required == {"tag", "base_image", "buildkit_image", "sbom_generator"}


def test_actionlint_detects_an_unknown_field(tmp_path: Path) -> None:
    program = find_program("actionlint", ACTIONLINT)
    if program is None:
        pytest.skip("neither actionlint nor Go to build it is installed")
    path = tmp_path / "release.yml"
    for text, returncode in ((WORKFLOW.read_text(), 0), (WORKFLOW.read_text().replace("needs:", "need:", 1), 1)):
        path.write_text(text)
        assert subprocess.run([program, path], check=False, stdout=subprocess.DEVNULL).returncode == returncode


def test_all_jobs_use_the_commit_to_which_the_first_one_resolves_the_tag() -> None:
    refs = {
        name: [step["with"]["ref"] for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        for name, job in JOBS.items()
    }

    assert refs == {"verify": ["refs/tags/${{ inputs.tag }}"], "image": [COMMIT], "publish": [COMMIT]}
    assert JOBS["verify"]["outputs"] == {"commit": "${{ steps.resolve.outputs.commit }}"}
    assert JOBS["publish"]["env"] == {"COMMIT": COMMIT}
    assert (JOBS["image"]["needs"], JOBS["publish"]["needs"]) == ("verify", ["verify", "image"])


def test_a_tag_without_a_commit_stops_the_release(tmp_path: Path, run_script: Run) -> None:
    """With an empty output, the next jobs would check out the branch of the workflow."""
    (resolve,) = (step["run"] for step in JOBS["verify"]["steps"] if step.get("id") == "resolve")
    output = tmp_path / "output"

    assert run_script(resolve, GITHUB_OUTPUT=str(output), GIT_CEILING_DIRECTORIES=str(tmp_path)).returncode != 0
    commit = commit_to(tmp_path / "origin", "first")

    assert run_script(f"cd origin\n{resolve}", GITHUB_OUTPUT=str(output)).returncode == 0
    assert output.read_text() == f"commit={commit}\n"


@pytest.mark.parametrize("options", [(), ("--annotate", "--message=x")], ids=["lightweight tag", "annotated tag"])
def test_a_moved_tag_stops_the_release(options: tuple[str, ...], tmp_path: Path, run_script: Run) -> None:
    origin = tmp_path / "origin"
    commit = commit_to(origin, "first")
    git(origin, "tag", *options, TAG)
    git(origin, "clone", "--quiet", ".", tmp_path / "clone")
    script = f"cd clone\n{get_script('Check that the tag still points to the commit')}"
    assert run_script(script, COMMIT=commit).returncode == 0

    commit_to(origin, "second")
    git(origin, "tag", "--force", *options, TAG)
    completed = run_script(script, COMMIT=commit)

    assert completed.returncode == 1
    assert f"the tag was moved; the images were built from {commit}" in completed.stdout


def test_the_tag_is_checked_before_the_first_image_gets_it_and_directly_before_the_release() -> None:
    scripts = [step.get("run", "") for step in STEPS]
    checks = [number for number, script in enumerate(scripts) if script.startswith("git fetch")]
    (combine,) = (number for number, script in enumerate(scripts) if "imagetools create --tag" in script)
    (release,) = (number for number, script in enumerate(scripts) if "gh release create" in script)

    assert checks == [combine - 1, release - 1]


def test_images_are_pushed_and_passed_on_by_digest() -> None:
    (build,) = (step for step in JOBS["image"]["steps"] if step.get("id") == "build")
    matrix = JOBS["image"]["strategy"]["matrix"]
    outputs = [f"{name}-{platform}" for name in matrix["name"] for platform in matrix["platform"]]

    assert "push-by-digest=true" in build["run"]
    assert "--tag" not in build["run"]
    assert '"$NAME-$PLATFORM=$digest" >> "$GITHUB_OUTPUT"' in build["run"]
    assert JOBS["image"]["outputs"] == {name: f"${{{{ steps.build.outputs.{name} }}}}" for name in outputs}
    (combine,) = (step for step in STEPS if "imagetools create" in step.get("run", ""))
    assert combine["env"] == {
        name.upper().replace("-", "_"): f"${{{{ needs.image.outputs.{name} }}}}" for name in outputs
    }


def test_the_signed_images_are_the_indexes_of_the_images_that_were_built(
    tmp_path: Path, calls: Path, run_script: Run
) -> None:
    assert run_script(get_script("Combine the images of both platforms"), **DIGESTS, INDEX=INDEX).returncode == 0

    variables = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    digest = f"sha256:{hashlib.sha256(INDEX.encode()).hexdigest()}"
    assert variables == {"OPERATOR_DIGEST": digest, "TRAINER_DIGEST": digest}
    sign = get_script("Sign the images and attach the SBOMs of their Python packages")
    assert run_script(sign, **variables).returncode == 0
    docker = [call for call in calls.read_text().splitlines() if call.startswith("docker")]
    cosign = [call for call in calls.read_text().splitlines() if call.startswith("cosign")]
    names = ("operator", "trainer")
    for name in names:
        sources = f"{REGISTRY}/{name}@{AMD64} {REGISTRY}/{name}@{ARM64}"
        assert f"docker buildx imagetools create --tag {REGISTRY}/{name}:{TAG} {sources}" in docker
        assert f"docker buildx imagetools inspect {REGISTRY}/{name}@{digest}" in docker
    assert len(docker) == 6
    assert [(call.split()[1], call.split()[-1]) for call in cosign] == [
        (verb, f"{REGISTRY}/{name}@{digest}") for name in names for verb in ("sign", "attest")
    ]


@pytest.mark.parametrize("name", ["OPERATOR_AMD64", "TRAINER_ARM64"])
def test_an_image_without_a_digest_stops_the_release(name: str, calls: Path, run_script: Run) -> None:
    completed = run_script(get_script("Combine the images of both platforms"), **{**DIGESTS, name: ""}, INDEX=INDEX)

    assert completed.returncode != 0
    assert f"/{name.partition('_')[0].lower()}:" not in calls.read_text()


@pytest.mark.parametrize(
    ("printed", "signed"),
    [
        pytest.param(f"Pushed: x\nDigest: {AMD64}\n", [f"{REGISTRY}/charts/finetune-operator@{AMD64}"], id="digest"),
        pytest.param("Pushed: x\n", [], id="no digest"),
    ],
)
def test_the_chart_is_signed_by_the_digest_that_was_pushed(
    printed: str, signed: list[str], calls: Path, run_script: Run
) -> None:
    completed = run_script(get_script("Push and sign the chart"), PUSHED=printed)

    assert (completed.returncode == 0) == bool(signed)
    assert [call.split()[-1] for call in calls.read_text().splitlines() if call.startswith("cosign")] == signed


def test_nothing_is_signed_by_a_tag() -> None:
    commands = [
        line.strip() for job in JOBS.values() for step in job["steps"] for line in step.get("run", "").splitlines()
    ]
    signed = [command for command in commands if re.match(r"cosign (sign|attest) ", command)]

    assert len(signed) == 3
    assert [command for command in signed if not re.search(r'"\$REGISTRY/(\$image|\S+@\$digest)"$', command)] == []
