"""Upgrade and rollback of the operator with jobs in every state: `python -m testing.upgrade`.

Switches from the last commit before names had patterns and pods had keys to this tree, from this tree to a "next
release" that differs in spec, status, defaults and image, and back. Prints a table with one row per state.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from testing.cluster.host.commands import HarnessError, stage
from testing.cluster.provider import choose_provider
from testing.processes.operator_stack import OPERATOR_NAMESPACE, OperatorInstallation, RawBody
from testing.upgrade.releases import Release, create_releases
from testing.upgrade.states import STATES, Before, Switch, build_job, wait_for_state

PREVIOUS_COMMIT = "55edb6f3"  # the last commit before names had patterns and pods had keys
DIRECTIONS = (("previous", "this"), ("this", "next"), ("next", "this"))
# fields of jobs that began with a release: a name that this release refuses, and fields that it does not know
EXTRA_FIELDS: dict[str, RawBody] = {
    "previous": {"imagePullSecrets": [{"name": "No_Name"}]},
    "next": {"note": "set by a user", "network": {"mtu": 9000}},
}
DEPLOYMENT = "deployment/finetune-operator"

Row = dict[str, str]  # result by direction


def main() -> int:
    """Run the switches; return exit code 1 if a job was harmed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--previous", default=PREVIOUS_COMMIT, help=f"commit to upgrade from ({PREVIOUS_COMMIT})")
    parser.add_argument("--directions", default="", help="for example this-next,next-this (default: all)")
    parser.add_argument("--objects", type=Path, help="folder for the job objects before each switch")
    options = parser.parse_args()
    choice = choose_provider(os.environ)
    if choice.provider is None:
        print(f"SKIPPED: no cluster: {choice.explanation}")
        return 0
    installation = OperatorInstallation(choice.provider)
    releases = create_releases(choice.provider.cache, previous_commit=options.previous)
    directions = [d for d in DIRECTIONS if not options.directions or "-".join(d) in options.directions.split(",")]
    load_images(installation, [releases[name] for name in dict.fromkeys(sum(directions, ()))])
    table: dict[str, Row] = {case.name: {} for case in STATES}
    for old, new in directions:
        results = switch_releases(installation, releases[old], releases[new], objects=options.objects)
        for state, result in results.items():
            table[state][f"{old} to {new}"] = result
    print(render_table(table))
    return 0 if all(result == "ok" for row in table.values() for result in row.values()) else 1


def load_images(installation: OperatorInstallation, releases: list[Release]) -> None:
    """Start the cluster and load the images of the releases into its nodes."""
    installation.provider.up()
    for release in releases:
        for archive in release.build_images(installation.provider.cache):
            installation.provider.load_image(archive)
    installation.prepare_namespace()
    installation.prepare_storage()


def switch_releases(
    installation: OperatorInstallation, old: Release, new: Release, *, objects: Path | None
) -> dict[str, str]:
    """Create a job per state with the old release, install the new one, and return the result of each check."""
    direction = f"{old.name}-{new.name}"
    install(installation, old)
    switch = Switch(installation, old.trainer_image)
    jobs = {case.name: f"{case.name.lower()}-{direction}" for case in STATES}
    results: dict[str, str] = {}
    before: dict[str, Before] = {}
    for case in STATES:
        if case.name == "Queued":  # created while no operator runs
            installation.kubectl("scale", "--namespace", OPERATOR_NAMESPACE, DEPLOYMENT, "--replicas=0")
            # the rollout is complete before the processes have ended
            installation.kubectl(
                "wait", "--for=delete", "pod", "--all", "--namespace", OPERATOR_NAMESPACE, "--timeout=60s"
            )
        # a job that has not begun must have valid names
        extra_fields = {} if (old.name, case.name) == ("previous", "Queued") else EXTRA_FIELDS.get(old.name, {})
        installation.apply(build_job(case, jobs[case.name], image=old.trainer_image, extra_fields=extra_fields))
        with stage(f"{direction}: a job is {case.name}"):
            before[case.name] = wait_for_state(switch, case, jobs[case.name])
    save_objects(before, objects and objects / direction)
    with stage(f"{direction}: install {new.name}"):
        install(installation, new)
    for case in STATES:
        with stage(f"{direction}: check {case.name}"):
            try:
                case.check(switch, jobs[case.name], before[case.name])
                results[case.name] = "ok"
            except (AssertionError, TimeoutError, RuntimeError) as error:
                results[case.name] = f"FAILED: {str(error)[:300]}"
                print(error, file=sys.stderr)
    for job in jobs.values():
        installation.delete(job)
    return results


def install(installation: OperatorInstallation, release: Release) -> None:
    """Install the chart and images of a release, and wait until its operator leads and has made a pass."""
    installation.helm(
        *("upgrade", "--install", "finetune-operator", str(release.chart), "--namespace", OPERATOR_NAMESPACE),
        *("--create-namespace", "--wait", "--timeout", "120s", *release.build_helm_options()),
    )


def save_objects(before: dict[str, Before], folder: Path | None) -> None:
    """Write the job objects to the folder, for tests that read objects of another release."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for state, observed in before.items():
        (folder / f"{state.lower()}.json").write_text(json.dumps(observed.job, indent=1) + "\n")


def render_table(table: dict[str, Row]) -> str:
    """Render the results as a Markdown table: state x direction."""
    directions = list(dict.fromkeys(direction for row in table.values() for direction in row))
    lines = [f"| state | {' | '.join(directions)} |", f"| --- |{' --- |' * len(directions)}"]
    for state, row in table.items():
        lines.append(f"| {state} | {' | '.join(row.get(direction, 'not run') for direction in directions)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HarnessError as error:
        sys.exit(f"upgrade: {error}")
