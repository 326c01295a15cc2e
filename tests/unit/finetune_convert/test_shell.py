"""Tests of reading shell text: variables, quotes, arithmetic, and constructs that are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_convert.conversion import ConversionError
from finetune_convert.shell.ascii_text import decode_from_ascii, encode_as_ascii
from finetune_convert.shell.commands import ShellScript, read_script
from finetune_convert.shell.words import compute_arithmetic


def read_words(text: str) -> list[str]:
    (command,) = read_script(text).commands
    return [word.text for word in command.words]


def read_environment(text: str) -> dict[str, str]:
    (command,) = read_script(text).commands
    return {name: word.text for name, word in command.environment.items()}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("a 'b c' \"d e\" f\\ g", ["a", "b c", "d e", "f g"], id="quotes"),
        pytest.param('X=1\na $X ${X} "$X$X"', ["a", "1", "1", "11"], id="variables"),
        pytest.param("a ${X:-d}", ["a", "d"], id="default"),
        pytest.param("X='b  c'\na $X", ["a", "b", "c"], id="splitting"),
        pytest.param("X='b c'\na \"$X\"", ["a", "b c"], id="no splitting in quotes"),
        pytest.param("X=(b 'c d')\na \"${X[@]}\"", ["a", "b", "c d"], id="array"),
        pytest.param('X=()\na "${X[@]}" b', ["a", "b"], id="empty array"),
        pytest.param("n=4\na $((32 / n)) $((2*(n-1)))", ["a", "8", "6"], id="arithmetic"),
        pytest.param("n=4\na $(expr 16 / $n) $(expr 2 \\* 3)", ["a", "4", "6"], id="expr"),
        pytest.param("a \\\n  b \\  \n  c", ["a", "b", "c"], id="continuation"),
        pytest.param("a\r\n", ["a"], id="windows line ends"),
        pytest.param("```bash\na b\n```", ["a", "b"], id="markdown fence"),
        pytest.param("$ a b", ["a", "b"], id="prompt"),
        pytest.param("nohup a b > log 2>&1 &", ["a", "b"], id="background with redirects"),
        pytest.param("a b 2>&1 | tee log", ["a", "b"], id="pipe"),
        pytest.param("a 'id#500'", ["a", "id#500"], id="hash in quotes"),
        pytest.param("a x#500 # comment", ["a", "x#500"], id="hash in a word"),
        pytest.param('a "$@" b', ["a", "b"], id="arguments of the script"),
        pytest.param("X=b\nX+=c\na $X", ["a", "bc"], id="append"),
        pytest.param('a 训练 "é ü" {\U0010ffff}', ["a", "训练", "é ü", "{\U0010ffff}"], id="beyond ASCII"),
        pytest.param("a zqU zqU41Uqz", ["a", "zqU", "zqU41Uqz"], id="marks of the encoding"),
        pytest.param("env X=1 a b", ["a", "b"], id="env"),
    ],
)
def test_words_are_those_of_the_shell(text: str, words: list[str]) -> None:
    assert read_words(text) == words


def test_the_environment_contains_exported_variables_and_prefixes() -> None:
    assert read_environment("export A=1\nB=2\nC=3 cmd") == {"A": "1", "C": "3"}


def test_a_variable_that_no_command_reads_is_reported() -> None:
    script = read_script("CUDA_VISIBLE_DEVICES=0,1\nswift sft")

    (entry,) = script.entries
    assert (entry.option, entry.line) == ("CUDA_VISIBLE_DEVICES", 1)
    assert "neither exported nor used" in entry.message


@pytest.mark.parametrize(
    "text", ["a $(date)", "a `date`", "a $UNKNOWN", "a *.json", "a {b,c}", "a ${X//b/c}", "a <(ls)"], ids=str
)
def test_a_value_that_only_a_shell_can_compute_is_unresolved(text: str) -> None:
    (command,) = read_script(text).commands

    assert any(word.unresolved for word in command.words)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("for i in 1 2; do swift sft; done", 1),
        ("\nif true; then torchrun a.py; fi", 2),
        ("(python a.py)", 1),
        ("swift() { torchrun a.py; }", 1),
        ("cat <<EOF | python\nprint(1)\nEOF", 1),
    ],
)
def test_a_construct_that_may_start_the_training_is_a_problem_with_its_line(text: str, line: int) -> None:
    script: ShellScript = read_script(text)

    assert script.problems
    assert script.problems[0].startswith(f"line {line}:")


@pytest.mark.parametrize("text", ["a 'b", 'a "b', "a ((", "a | | b"])
def test_broken_text_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(ConversionError, match=r"^line \d+: "):
        read_script(text)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("7 / 2", 3),
        ("-(4 % 3)", -1),
        ("1 / 0", None),
        ("2 ** 99999999", None),
        ("9999999999999 * 9", None),
        ("__import__('os')", None),
        ("(" * 100 + "1" + ")" * 100, None),
        ("", None),
    ],
)
def test_arithmetic_is_computed_only_if_it_is_constant_and_small(expression: str, value: int | None) -> None:
    assert compute_arithmetic(expression, {}) == value


@given(st.text())
def test_text_survives_its_encoding_as_ascii(text: str) -> None:
    assert decode_from_ascii(encode_as_ascii(text)) == text
