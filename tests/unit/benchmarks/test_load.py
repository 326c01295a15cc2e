"""Tests of the baseline objects that `make bench` creates without an operator."""

import re

from benchmarks.load import build_baseline_children
from finetune_operator import names

DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def test_names_of_baseline_objects_are_valid_dns_subdomains() -> None:
    children = build_baseline_children("baseline-0", attempt=0, nodes=2)

    assert [child["kind"] for child in children].count("Pod") == 2
    assert [child for child in children if not DNS_SUBDOMAIN.fullmatch(child["metadata"]["name"])] == []


def test_operator_ignores_baseline_objects() -> None:
    for child in build_baseline_children("baseline-0", attempt=0, nodes=2):
        assert child["metadata"]["ownerReferences"] == []
        assert names.JOB_UID not in child["metadata"]["labels"]
