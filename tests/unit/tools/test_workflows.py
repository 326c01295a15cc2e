"""Tests of what actionlint does not check in the workflows of GitHub and in the action that they share."""

import re
import subprocess

import yaml

from environment import ROOT
from testing.cluster.host.versions import PINNED

BODIES = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml")}
JOBS = [job for body in BODIES.values() for job in (body["jobs"].values() if "jobs" in body else [body["runs"]])]
STEPS = [step for job in JOBS for step in job["steps"]]
SCRIPTS = [step["run"] for step in STEPS if "run" in step]


def test_scripts_are_valid_and_contain_no_expressions() -> None:
    """The text of an expression could contain shell commands; environment variables are not parsed."""
    assert len(SCRIPTS) > 17
    assert [script for script in SCRIPTS if "${{" in script] == []
    for script in SCRIPTS:
        subprocess.run(("bash", "-n"), input=script, check=True, text=True)


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"\bmake ([a-z0-9-]+)", "\n".join(SCRIPTS)))

    assert targets > {"setup", "check", "test-unit", "test-simulation", "test-integration", "test-e2e"}
    subprocess.run(("make", "--dry-run", *targets), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_versions_of_actions_and_of_helm_are_pinned() -> None:
    actions = [step["uses"] for step in STEPS if not step.get("uses", "./").startswith("./")]

    assert len(actions) > 10
    assert [action for action in actions if not re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action)] == []
    assert [script for script in SCRIPTS if f"/cmd/helm@v{PINNED.helm}\n" in script]


def test_pull_request_is_complete_only_after_all_other_jobs() -> None:
    jobs = BODIES["pull-request"]["jobs"]

    assert jobs["complete"]["if"] == "always()", "a skipped job would count as a success"
    assert {*jobs["complete"]["needs"], "complete"} == jobs.keys()
