"""Tests of the providers that are found by the API versions of a cluster."""

import pytest

from finetune_api.v1alpha1.scheduling import API_VERSIONS, SchedulingProvider
from finetune_operator.observation.group_apis import find_group_apis


@pytest.mark.parametrize("provider", SchedulingProvider)
def test_provider_is_found_by_each_of_its_versions(provider: SchedulingProvider) -> None:
    for version in API_VERSIONS[provider]:
        assert find_group_apis(["apps/v1", version]).versions == {provider: version}


def test_preferred_version_is_used_if_both_are_served() -> None:
    served = ["scheduling.k8s.io/v1", "scheduling.k8s.io/v1alpha2", "scheduling.k8s.io/v1beta1"]

    assert find_group_apis(served).versions == {SchedulingProvider.POD_GROUP: "scheduling.k8s.io/v1beta1"}


def test_versions_that_the_operator_does_not_use_are_ignored() -> None:
    unused = [
        "scheduling.k8s.io/v1alpha3",
        "kueue.x-k8s.io/v1beta1",
        "scheduling.run.ai/v2",
        "batch.volcano.sh/v1alpha1",
    ]

    assert find_group_apis(unused).versions == {}
