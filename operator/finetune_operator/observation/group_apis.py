"""Finds the schedulers of a cluster that can start the pods of a job as a group, by the APIs that it serves."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from finetune_api.v1alpha1.scheduling import API_VERSIONS, SchedulingProvider


@dataclass(frozen=True)
class GroupApis:
    """API version of each available provider, and why others do not work although the cluster serves their API."""

    versions: Mapping[SchedulingProvider, str] = field(default_factory=dict)
    problems: Mapping[SchedulingProvider, str] = field(default_factory=dict)


def find_group_apis(served_versions: Iterable[str]) -> GroupApis:
    """Return the providers whose API the cluster serves, each with the preferred version."""
    served = frozenset(served_versions)
    found = {
        provider: next((version for version in versions if version in served), "")
        for provider, versions in API_VERSIONS.items()
    }
    return GroupApis({provider: version for provider, version in found.items() if version})
