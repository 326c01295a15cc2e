"""Reads YAML of other people within bounds, and prints YAML with control characters as escapes.

The values are those of JSON: keys are strings, dates are strings as for kubectl, and other tags are errors.
"""

import re
from functools import partial
from math import inf
from typing import Any

import yaml

from finetune_api.visible_text import CONTROLS

MAX_CHARACTERS = 1_000_000
MAX_VALUES = 100_000  # of all documents, with aliases written out
MAX_EXPANDED_CHARACTERS = 10 * MAX_CHARACTERS  # likewise
MAX_LEVELS = 50
MAX_DIGITS = 40  # longer numbers have no use, and Python refuses those of more than 4,300 digits
_TAG = "tag:yaml.org,2002:"
_SCALARS = frozenset(f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str"))
_JSON = _SCALARS | {f"{_TAG}seq", f"{_TAG}map"}
_Problem = partial(yaml.constructor.ConstructorError, None, None)  # called with a text and a position
_NUMBERS, _MERGE = (f"{_TAG}int", f"{_TAG}float"), f"{_TAG}merge"


class InvalidYaml(ValueError):
    """Raised for text that is no YAML, or exceeds a bound; the message is one line with line and column."""


class _BoundedLoader(yaml.SafeLoader):
    """Composes and constructs documents within the bounds of this module."""

    yaml_constructors = {  # noqa: RUF012  a class variable, as in the base class
        tag: construct for tag, construct in yaml.SafeLoader.yaml_constructors.items() if tag in _JSON or tag is None
    }
    yaml_implicit_resolvers = {  # noqa: RUF012  a class variable, as in the base class
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _SCALARS or tag == _MERGE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, *, refuses_repeated_keys: bool) -> None:
        super().__init__(text)
        self._refuses_repeated_keys = refuses_repeated_keys
        self._values = self._characters = 0.0  # of all documents
        self._depth = self._deepest = 0.0  # number of open values; level of the deepest one in the newest open value
        # values, characters and levels by anchor of this document, once its value is complete
        self._anchored: dict[str | None, tuple[float, float, float]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self._anchored = self._anchored if self._depth else {}
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.anchors:  # an open value is repeated without end by a part of itself
                self._count(event.start_mark, *self._anchored.get(event.anchor, (inf, inf, inf)))
            return super().compose_node(parent, index)
        values, characters, deepest = self._values, self._characters, self._deepest
        self._deepest = self._depth
        self._count(event.start_mark, 1, len(getattr(event, "value", "")), 1)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            levels = self._deepest - self._depth
            self._anchored[event.anchor] = self._values - values, self._characters - characters, levels
        self._deepest = max(deepest, self._deepest)
        return node

    def _count(self, mark: Any, values: float, characters: float, levels: float) -> None:
        """Count a value inside of the open values."""
        self._values += values
        self._characters += characters
        self._deepest = max(self._deepest, self._depth + levels)
        if self._deepest > MAX_LEVELS:
            raise _Problem(f"is nested too deeply: more than {MAX_LEVELS} levels, with aliases written out", mark)
        if self._values > MAX_VALUES or self._characters > MAX_EXPANDED_CHARACTERS:
            limits = f"{MAX_VALUES} values or {MAX_EXPANDED_CHARACTERS} characters"
            raise _Problem(f"is too large: more than {limits}, with aliases written out", mark)

    def compose_scalar_node(self, anchor: dict[str, yaml.Node]) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        node.value.encode()  # raises ValueError for half of a surrogate pair, which is no text
        if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            raise _Problem(f"a number has more than {MAX_DIGITS} characters; quote a text", node.start_mark)
        return node

    def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        node.value = [(_build_key(key), value) for key, value in node.value]
        names = [key for key, _ in node.value if key.tag == f"{_TAG}str"] if self._refuses_repeated_keys else []
        known_names: set[str] = set()
        for name in names:
            if name.value in known_names:
                raise _Problem(f"{name.value} is given twice", name.start_mark)
            known_names.add(name.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # of a tag such as !!int before a text
            problem = f"expected {node.tag.removeprefix(_TAG)}, found {str(node.value)[:MAX_DIGITS]!r}"
            raise _Problem(problem, node.start_mark) from error


_BoundedLoader.add_implicit_resolver(
    f"{_TAG}float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_yaml(text: str, *, refuses_repeated_keys: bool = True) -> list[Any]:
    """Return the documents of a YAML text.

    Raises:
        InvalidYaml: The text is no YAML, repeats a key, or exceeds a bound.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidYaml(f"has more than {MAX_CHARACTERS} characters")
    loader: Any = None
    try:
        loader = _BoundedLoader(text, refuses_repeated_keys=refuses_repeated_keys)
        documents = []
        while loader.check_data():
            documents.append(loader.get_data())
        return documents
    except yaml.reader.ReaderError as error:
        start = text.rfind("\n", 0, error.position) + 1
        line, column = text.count("\n", 0, start), error.position - start
        problem: object = f"the character {chr(error.character)!r} is not allowed"
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark or loader.get_mark(), error.problem or error.context
        line, column = mark.line, mark.column
    except ValueError as error:  # of the scanner, such as "\U00110000"
        line, column, problem = loader.get_mark().line, loader.get_mark().column, error
    raise InvalidYaml(f"line {line + 1}, column {column + 1}: {' '.join(str(problem).split())[:300]}")


def dump_yaml(*documents: Any, **layout: Any) -> str:
    """Return documents as YAML with control characters, and then all beyond ASCII, as escapes of YAML.

    layout: parameters of yaml.dump, such as width.
    """
    text: str = yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, **layout)
    return yaml.safe_dump_all(documents, sort_keys=False, **layout) if CONTROLS.search(text) else text


def _build_key(key: yaml.Node) -> yaml.Node:
    """Return the node of a key that is read as a string. Its anchor may belong to a value, so it is not changed."""
    is_scalar = isinstance(key, yaml.ScalarNode) and key.tag in _SCALARS
    return yaml.ScalarNode(f"{_TAG}str", key.value, key.start_mark, key.end_mark) if is_scalar else key
