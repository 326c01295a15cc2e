"""Tests of the cache of results by the identity of the argument."""

from finetune_operator.controller.identity_cache import IdentityCache


def test_the_same_object_is_computed_once_and_an_equal_one_again() -> None:
    computed: list[dict[str, int]] = []

    def compute(source: dict[str, int]) -> int:
        computed.append(source)
        return source["a"]

    cache = IdentityCache(compute, max_entries=2)
    first, equal = {"a": 1}, {"a": 1}

    assert [cache(first), cache(first), cache(equal)] == [1, 1, 1]
    assert len(computed) == 2


def test_the_argument_that_was_used_least_recently_is_dropped() -> None:
    computed: list[str] = []

    def compute(source: list[str]) -> None:
        computed.append(source[0])

    cache = IdentityCache(compute, max_entries=2)
    first, second, third = ["first"], ["second"], ["third"]
    for source in (first, second, first, third, first, second):
        cache(source)

    assert computed == ["first", "second", "third", "second"]
