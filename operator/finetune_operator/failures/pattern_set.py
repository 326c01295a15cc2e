"""Set of case-insensitive regular expressions that are matched together in linear time.

The texts are controlled by tenants, and the `re` module can need seconds for a text of 4 KB (decisions/215).
"""

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import re2

MAX_TEXT_BYTES = 8192
_MAX_MEMORY_BYTES = 64 << 20  # memory limit of the automaton; a larger set would match nothing
Label = TypeVar("Label")


class PatternSet(Generic[Label]):
    """Ordered set of labelled expressions in RE2 syntax, which has no lookaround.

    `exceptions` maps an expression to another expression that must not match the same text.
    """

    def __init__(self, entries: Sequence[tuple[Label, str]], *, exceptions: Mapping[str, str] | None = None) -> None:
        options = re2.Options()
        options.case_sensitive = False
        options.max_mem = _MAX_MEMORY_BYTES
        options.log_errors = False
        self._set = re2.Set.SearchSet(options)
        for _, expression in entries:
            self._set.Add(expression)
        self._set.Compile()
        self._labels: list[Label] = [label for label, _ in entries]
        exceptions = exceptions or {}
        self._exceptions = {
            index: re2.compile(exceptions[expression], options)
            for index, (_, expression) in enumerate(entries)
            if expression in exceptions
        }

    def find_first(self, text: str) -> Label | None:
        """Return the label of the first expression that matches anywhere in the text, or None."""
        content = text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
        matches: list[int] = self._set.Match(content) or []
        for index in sorted(matches):
            exception = self._exceptions.get(index)
            if exception is None or exception.search(content) is None:
                return self._labels[index]
        return None
