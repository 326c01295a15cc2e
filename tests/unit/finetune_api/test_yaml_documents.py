"""Tests of reading YAML of other people: people's manifests are read, hostile ones are refused in one line."""

import time

import pytest

from finetune_api.yaml_documents import MAX_CHARACTERS, MAX_VALUES, InvalidYaml, load_yaml


def nest_aliases(levels: int, *, width: int = 9) -> str:
    """Return a YAML text whose size grows by the factor `width` with each level."""
    lines = ["a0: &a0 x"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels + 1)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        pytest.param(
            "a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}",
            {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}},
            id="anchors",
        ),
        pytest.param(
            "a: 2020-99-99\nb: 2020-01-01T00:00:00Z", {"a": "2020-99-99", "b": "2020-01-01T00:00:00Z"}, id="dates"
        ),
        pytest.param(
            "1: a\nyes: b\n~: c\n2020-01-01: d", {"1": "a", "yes": "b", "~": "c", "2020-01-01": "d"}, id="keys"
        ),
        pytest.param("&k 1: {x: *k}", {"1": {"x": 1}}, id="anchor of a key"),
        pytest.param(
            "[1e-4, 0x1f, 010, .5, .inf, yes, ~, =]", [1e-4, 31, 8, 0.5, float("inf"), True, None, "="], id="scalars"
        ),
        pytest.param("{a: &x {k: 1}, b: {<<: [*x, *x], k: 2}}", {"a": {"k": 1}, "b": {"k": 2}}, id="overridden merge"),
        pytest.param('{"a": "\\x1b\\u202e"}', {"a": "\x1b\u202e"}, id="escapes"),
        pytest.param("[" * 50 + "]" * 50, None, id="50 levels"),
        pytest.param(nest_aliases(4), None, id="7,000 values by aliases"),
        pytest.param(f"a: {'9' * 40}", {"a": int("9" * 40)}, id="long number"),
    ],
)
def test_a_manifest_has_the_values_of_json(text: str, values: object) -> None:
    (document,) = load_yaml(text)

    assert values is None or document == values


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(nest_aliases(8), f"more than {MAX_VALUES} values", id="aliases of aliases"),
        pytest.param(f"a: &a '{'x' * 900_000}'\nb: [{'*a, ' * 20}]", "or 10000000 characters", id="aliases of a text"),
        pytest.param(
            "a: &a {x: 1}\n"
            + "\n".join(f"b{n}: &b{n} {{<<: [{'*a, ' * 9}{f'*b{n - 1}, ' * 9 if n else ''}]}}" for n in range(9)),
            "values",
            id="merges",
        ),
        pytest.param("&a [*a]", "more than 50 levels, with aliases written out", id="cycle"),
        pytest.param("&a {b: {c: *a}}", "more than 50 levels, with aliases written out", id="nested cycle"),
        pytest.param("*a", "undefined alias", id="undefined alias"),
        pytest.param("[" * 5000, "more than 50 levels", id="nested lists"),
        pytest.param("? " * 5000 + "x", "more than 50 levels", id="nested keys"),
        pytest.param("\n".join(" " * n + "a:" for n in range(60)), "more than 50 levels", id="nested mappings"),
        pytest.param(
            "".join(f"- &a{n} [{f'*a{n - 1}' if n else ''}]\n" for n in range(60)),
            "more than 50 levels",
            id="levels by aliases",
        ),
        pytest.param("[" + "1," * (MAX_VALUES + 1) + "]", f"more than {MAX_VALUES} values", id="values"),
        pytest.param("---\n" * 10 + "- 1\n" * MAX_VALUES, f"more than {MAX_VALUES} values", id="values of documents"),
        pytest.param("x" * (MAX_CHARACTERS + 1), f"more than {MAX_CHARACTERS} characters", id="characters"),
        pytest.param(f"a: {'9' * 5000}", "line 1, column 4: a number has more than 40", id="digits"),
        pytest.param(f"a: 0x{'f' * 800_000}", "a number has more than 40", id="hexadecimal digits"),
        pytest.param(f"a: 1{':59' * 100_000}", "a number has more than 40", id="sexagesimal number"),
        pytest.param(f"%YAML {'9' * 5000}.1\n--- a", "line 1", id="digits of a directive"),
        pytest.param("!!int ''", "line 1, column 1: expected int, found ''", id="empty number"),
        pytest.param("!!int x", "expected int, found 'x'", id="no number"),
        pytest.param("0x_", "expected int, found '0x_'", id="number without digits"),
        pytest.param("!!bool maybe", "expected bool", id="no boolean"),
        pytest.param("!!float x", "expected float", id="no float"),
        pytest.param("!!int [1]", "expected a scalar node", id="list as number"),
        pytest.param("!!timestamp x", "could not determine a constructor for the tag", id="no date"),
        pytest.param("!!binary '%'", "could not determine a constructor", id="binary"),
        pytest.param("!!set {a}", "could not determine a constructor", id="set"),
        pytest.param("!!python/object/apply:os.system [id]", "could not determine a constructor", id="Python"),
        pytest.param("? [a]\n: b", "found unhashable key", id="list as key"),
        pytest.param("? {a: b}\n: c", "found unhashable key", id="mapping as key"),
        pytest.param("a: 1\nb: {c: 1, 'c': 2}", "line 2, column 11: c is given twice", id="repeated key"),
        pytest.param("<<: 1", "expected a mapping", id="merged number"),
        pytest.param("a\x1b[2J", "line 1, column 2: the character '\\x1b' is not allowed", id="control character"),
        pytest.param("a: 1\nb: \x9b", "line 2, column 4: the character", id="C1 character"),
        pytest.param('"\\U00110000"', "line 1", id="no character"),
        pytest.param("a: [1", "line 1, column 6: expected ',' or ']'", id="syntax"),
        pytest.param("&a 1\n--- *a", "undefined alias", id="alias of another document"),
        pytest.param("{a: &a 1, b: &a 2}", "second occurrence", id="repeated anchor"),
    ],
)
def test_hostile_yaml_is_one_line_with_its_position_in_little_time(text: str, problem: str) -> None:
    started_at = time.process_time()
    with pytest.raises(InvalidYaml) as raised:
        load_yaml(text)

    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500
    assert len(text) > MAX_CHARACTERS or str(raised.value).startswith("line ")
    assert time.process_time() - started_at < 15


def test_keys_of_other_tools_may_be_repeated() -> None:
    assert load_yaml("a: 1\na: 2", refuses_repeated_keys=False) == [{"a": 2}]
