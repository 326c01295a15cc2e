"""Tests of several releases of the chart in one cluster, and of a release without rights in the whole cluster."""

import itertools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm import CHART, render_chart

RawBody = dict[str, Any]
POLICIES = 'admissionPolicies={"children":{"enabled":true},"operator":{"enabled":true},"jobs":{"maxGpus":8}}'
# the right by which the policy for children recognises an operator
CHECK = re.compile(
    r'authorizer\.group\("(?P<group>\S+)"\)\.resource\("(?P<resource>\S+)"\)\.subresource\("(?P<subresource>\S+)"\)'
    r'\s+\.namespace\(request\.namespace\)\.check\("(?P<verb>\S+)"\)\.allowed\(\)'
)
NO_CLUSTER_RIGHTS = ("installCRD=false", "userRoles=false", 'watchNamespaces=["team"]')


@dataclass(frozen=True)
class RenderedRelease:
    """The objects of a release, and the namespaces whose jobs it runs; empty: all."""

    documents: tuple[RawBody, ...]
    watched: tuple[str, ...] = ()

    def list_objects(self, kind: str) -> list[RawBody]:
        return [document for document in self.documents if document["kind"] == kind]

    @property
    def account(self) -> tuple[str, str]:
        """Namespace and name of the operator's ServiceAccount."""
        (account,) = self.list_objects("ServiceAccount")
        (deployment,) = self.list_objects("Deployment")
        name = account["metadata"]["name"]
        assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == name
        return account["metadata"]["namespace"], name

    @property
    def policy(self) -> RawBody:
        """The policy for children of jobs."""
        policies = self.list_objects("ValidatingAdmissionPolicy")
        (policy,) = (each["spec"] for each in policies if each["metadata"]["name"].endswith("-children"))
        return dict(policy)


def render(helm: Path, name: str, *settings: str, watched: tuple[str, ...] = ()) -> RenderedRelease:
    values = (f"watchNamespaces={list(watched)}".replace("'", '"'), *settings)
    text = render_chart(helm, *values, release=name, namespace=f"{name}-system", has_tests=False)
    return RenderedRelease(tuple(document for document in yaml.safe_load_all(text) if document), watched)


@pytest.fixture(scope="module")
def releases(helm: Path) -> tuple[RenderedRelease, RenderedRelease]:
    """Return two releases for different namespaces, each with all policies."""
    return (
        render(helm, "first", POLICIES, watched=("a", "b")),
        render(helm, "second", POLICIES, "installCRD=false", watched=("c",)),
    )


def list_names(release: RenderedRelease) -> set[tuple[str, str, str]]:
    return {(d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]) for d in release.documents}


def list_grants(release: RenderedRelease, account: tuple[str, str]) -> set[tuple[str, str, str, str]]:
    """Return what the bindings of a release grant to an account: namespace (* for all), group, resource and verb."""
    roles = {
        (role["kind"], role["metadata"].get("namespace"), role["metadata"]["name"]): role["rules"]
        for role in (*release.list_objects("Role"), *release.list_objects("ClusterRole"))
    }
    grants = set()
    for binding in (*release.list_objects("RoleBinding"), *release.list_objects("ClusterRoleBinding")):
        if account not in [(subject["namespace"], subject["name"]) for subject in binding["subjects"]]:
            continue
        namespace = binding["metadata"].get("namespace")
        for rule in roles[binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]]:
            fields = itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
            grants |= {(namespace or "*", *each) for each in fields}
    return grants


def test_two_releases_have_no_object_in_common(releases: tuple[RenderedRelease, RenderedRelease]) -> None:
    first, second = map(list_names, releases)

    assert first & second == set()
    kinds = [kind for kind, namespace, _ in second if not namespace]
    assert kinds.count("ValidatingAdmissionPolicy") == kinds.count("ValidatingAdmissionPolicyBinding") == 8
    assert kinds.count("ClusterRole") == 2


def test_the_policy_of_each_release_permits_the_operator_of_the_other(
    releases: tuple[RenderedRelease, RenderedRelease],
) -> None:
    """The policy recognises an operator by a right that its own release grants, and contains no name of a release."""
    first, second = releases
    assert first.policy == second.policy
    (expression,) = (each["expression"] for each in first.policy["variables"] if each["name"] == "isOperator")
    assert "-system" not in expression
    check = CHECK.search(expression)
    assert check is not None

    for release in releases:
        grants = list_grants(release, release.account)
        right = (check["group"], f"{check['resource']}/{check['subresource']}", check["verb"])
        assert {grant[0] for grant in grants if grant[1:] == right} == set(release.watched)


def test_the_policy_permits_an_operator_of_all_namespaces(
    helm: Path, releases: tuple[RenderedRelease, RenderedRelease]
) -> None:
    release = render(helm, "third", "installCRD=false")

    assert release.policy == releases[0].policy
    assert ("*", "finetune.dev", "finetunejobs/status", "update") in list_grants(release, release.account)


def test_no_role_of_users_makes_them_operators(releases: tuple[RenderedRelease, RenderedRelease]) -> None:
    for release in releases:
        rules = [rule for role in release.list_objects("ClusterRole") for rule in role["rules"]]
        assert len(rules) == 2
        assert [
            rule for rule in rules if "finetunejobs/status" in rule["resources"] and "update" in rule["verbs"]
        ] == []


def render_notes(helm: Path, *settings: str) -> str:
    """Return what `helm install` prints about the release, without a cluster."""
    options = [option for setting in settings for option in ("--set-json", setting)]
    command: list[str | Path] = [helm, "install", "first", CHART, "--namespace", "team", "--dry-run=client", *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return output.partition("\nNOTES:\n")[2]


def test_a_release_without_cluster_rights_has_no_policy_and_its_notes_state_what_remains(helm: Path) -> None:
    release = render(helm, "first", "installCRD=false", "userRoles=false", watched=("team",))

    kinds = {document["kind"] for document in release.documents}
    assert kinds == {"Deployment", "PodDisruptionBudget", "Role", "RoleBinding", "ServiceAccount"}
    notes = render_notes(helm, *NO_CLUSTER_RIGHTS)
    assert "The policy admissionPolicies.children is off." in notes
    assert "can imitate a pod of its jobs" in notes
    page = (CHART.parents[1] / "docs" / "operations" / "security.md").read_text()
    assert "docs/operations/security.md#without-the-policy-for-children" in notes
    assert "# Without the policy for children" in page


@pytest.mark.parametrize("settings", [(), (*NO_CLUSTER_RIGHTS, 'admissionPolicies.children={"enabled":true}')])
def test_notes_mention_no_risk_if_the_policy_is_on(helm: Path, settings: tuple[str, ...]) -> None:
    notes = render_notes(helm, *settings)

    assert "The operator runs in namespace team" in notes
    assert "admissionPolicies" not in notes
