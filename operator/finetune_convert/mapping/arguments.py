"""Parses the words of a command, or the keys of a config, as options of a table."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from finetune_convert.conversion import ConversionError, Entry, EntryEffect
from finetune_convert.mapping.rules import Given
from finetune_convert.option_table import Option, OptionTable
from finetune_convert.shell.words import Word

_NUMBER = re.compile(r"-\d+(\.\d*)?([eE][+-]?\d+)?$")


def list_option_names(words: Sequence[Word]) -> tuple[str, ...]:
    """Return the names of all options of a command."""
    return tuple(word.text.lstrip("-").partition("=")[0] for word in words if is_option(word))


def is_option(word: Word) -> bool:
    """Return whether a word is the name of an option: it begins with a dash, and is no negative number."""
    return word.text.startswith("-") and len(word.text) > 1 and not _NUMBER.match(word.text)


def parse_arguments(words: Sequence[Word], table: OptionTable) -> tuple[dict[str, Given], list[Entry]]:
    """Return the options of a command, and entries for words that are no options.

    Raises: ConversionError with a line for each value of the wrong kind
    """
    given: dict[str, Given] = {}
    entries: list[Entry] = []
    problems: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not is_option(word):
            problem = "is no option and belongs to none; check the quotes and line ends before it"
            entries.append(Entry(word.text, EntryEffect.UNKNOWN, problem, line=word.line))
            continue
        name, equals, attached = word.text.lstrip("-").partition("=")
        values = [Word(attached, word.line, word.unresolved)] if equals else []
        option = table.find(name)
        while not equals and index < len(words) and not is_option(words[index]):
            if values and option is not None and not option.is_list:
                break
            values.append(words[index])
            index += 1
        try:
            option_name = option.name if option else name.replace("-", "_")
            parsed = _parse_values(option_name, option, word.line, values)
        except ValueError as error:
            found = " ".join(value.text for value in values) or "nothing"
            problems.append(f"line {word.line}: --{name}: expected {error}, found {found[:80]}")
            continue
        if parsed.name in given:
            entries.append(
                Entry(
                    parsed.name, EntryEffect.NOTE, "is given twice; the last value counts", line=given[parsed.name].line
                )
            )
        given[parsed.name] = parsed
    if problems:
        raise ConversionError(*problems)
    return given, entries


def _parse_values(name: str, option: Option | None, line: int, words: Sequence[Word]) -> Given:
    unresolved = next((word.unresolved for word in words if word.unresolved), None)
    text = " ".join(word.text for word in words)
    if unresolved or option is None:
        return Given(name, text, text, line, unresolved)
    if not words:
        if not option.is_flag and not option.is_list:
            raise ValueError("a value")
        return Given(name, True if option.is_flag else [], "true", line)
    if option.is_list:
        return Given(name, [option.parse(word.text) for word in words], text, line)
    return Given(name, option.parse(words[0].text), words[0].text, line)


def parse_config(config: Mapping[str, Any], table: OptionTable, lines: Mapping[str, int]) -> dict[str, Given]:
    """Return the options of a config file.

    Raises: ConversionError with a line for each value of the wrong kind
    """
    given: dict[str, Given] = {}
    problems: list[str] = []
    for key, value in config.items():
        option = table.options.get(key)
        name, line = (option.name if option else key), lines.get(key)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        try:
            parsed = option.parse(value) if option and isinstance(value, str) else value
        except ValueError as error:
            problems.append(f"line {line}: {key}: expected {error}, found {text[:80]}")
            continue
        given[name] = Given(name, parsed, text, line)
    if problems:
        raise ConversionError(*problems)
    return given
