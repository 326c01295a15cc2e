import pytest

from finetune_operator import names
from finetune_operator.kube.api_paths import COLLECTIONS, InvalidName, build_path, collection_path, object_path

HOSTILE_NAMES = (
    *("", ".", "..", "../x", "a/b", "/", "a/../../b", "%2e%2e", "a%2Fb", "a?watch=1", "a#b", "a b", "a\tb", "a\nb"),
    *("a\x00b", "a\x7f", "a\\b", "ü", "a\u2028b", 'a"b', "a<b", "a^b", "a`b", "a{b", "a|b", "a[b"),
)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_that_would_be_another_path_is_refused(name: str) -> None:
    for segments in ((name,), ("nodes", name), ("namespaces", name, "pods"), ("nodes", "a", name)):
        with pytest.raises(InvalidName, match="is not the name of an object"):
            build_path("v1", *segments)


@pytest.mark.parametrize("name", ["bert", "bert-0-0:8080", "a.b-c", "system:node", "...", "..a", "a~b", "A_b", "a=b,c"])
def test_a_name_that_kubernetes_permits_is_kept(name: str) -> None:
    assert object_path("Pod", "team", name, "log") == f"/api/v1/namespaces/team/pods/{name}/log"


def test_each_kind_has_a_path_below_its_api_version() -> None:
    paths = {kind: collection_path(kind, None) for kind in COLLECTIONS}

    assert paths["Pod"] == "/api/v1/pods"
    assert paths[names.FINETUNEJOB_KIND] == "/apis/finetune.dev/v1alpha1/finetunejobs"
    assert len(set(paths.values())) == len(COLLECTIONS)
