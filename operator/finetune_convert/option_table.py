"""Loads the option tables of the tools, and parses and finds options by them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any

REQUIRED = "required"
SAME_ID = "="
_TRUE, _FALSE = ("true", "yes", "y", "t", "1"), ("false", "no", "n", "f", "0")


@dataclass(frozen=True)
class Option:
    """An option of a tool; `only` lists the commands that have it, empty: all."""

    name: str
    type: str
    default: Any
    choices: tuple[Any, ...]
    only: tuple[str, ...]
    defaults: Mapping[str, Any]  # command -> default, where it differs

    def get_default(self, command: str) -> Any:
        """Return the default of the option for a command; None if the tool computes it."""
        value = self.defaults.get(command, self.default)
        is_code = isinstance(value, str) and value.startswith("<") and value.endswith(">")
        return None if is_code or value == REQUIRED else value

    @property
    def is_list(self) -> bool:
        """Whether the option has any number of values."""
        return re.search(r"\b(List|list|tuple)\[", self.type) is not None

    @property
    def is_flag(self) -> bool:
        """Whether the option is set by its name alone."""
        return re.search(r"\bbool\b", self.type) is not None

    def parse(self, text: str) -> Any:
        """Return the value of one word: a bool, a number, or the word itself.

        Raises: ValueError with the expected kind of value
        """
        lowered = text.lower()
        if self.is_flag and lowered in (*_TRUE, *_FALSE):
            return lowered in _TRUE
        if lowered in ("none", "null") and ("Optional" in self.type or "None" in self.type):
            return None
        for name, kind in (("int", int), ("float", float)):
            if re.search(rf"\b{name}\b", self.type):
                try:
                    return kind(text)
                except ValueError:
                    continue
        if set(re.findall(r"\w+", self.type)) <= {"int", "float", "Optional", "Union", "None"}:
            raise ValueError("a number" if "float" in self.type else "an integer")
        return text


@dataclass(frozen=True)
class OptionTable:
    """All options of one version of a tool."""

    name: str
    generated: str
    options: Mapping[str, Option]
    models: Mapping[str, str]  # name or ModelScope id -> Hugging Face id
    datasets: Mapping[str, str]

    def find(self, name: str) -> Option | None:
        """Return the option of this name; with dashes, or abbreviated, as argparse accepts it."""
        name = name.replace("-", "_")
        if name in self.options:
            return self.options[name]
        candidates = [option for option in self.options if option.startswith(name)]
        return self.options[candidates[0]] if len(candidates) == 1 and len(name) >= 4 else None

    def find_nearest(self, name: str) -> str | None:
        """Return the known option with the most similar name."""
        matches = get_close_matches(name.replace("-", "_"), self.options, n=1, cutoff=0.6)
        return matches[0] if matches else None


@cache
def load_table(name: str) -> OptionTable:
    """Return a packaged table, such as swift-3."""
    text = resources.files("finetune_convert").joinpath("tables", f"{name}.json").read_text(encoding="utf-8")
    content = json.loads(text)
    options: dict[str, Option] = {}
    for key, entry in content["options"].items():
        option = Option(
            key,
            entry["type"],
            entry.get("default"),
            tuple(entry.get("choices", ())),
            tuple(entry.get("only", ())),
            entry.get("defaults", {}),
        )
        options.update(dict.fromkeys((key, *entry.get("aliases", ())), option))
    models, datasets = (_expand(content.get(section, {})) for section in ("models", "datasets"))
    return OptionTable(name, content["generated"], options, models, datasets)


def _expand(hub_ids: Mapping[str, str]) -> dict[str, str]:
    return {name: name if hub_id == SAME_ID else hub_id for name, hub_id in hub_ids.items()}


def choose_version(tables: Sequence[OptionTable], names: Sequence[str]) -> tuple[OptionTable, tuple[str, ...]]:
    """Return the newest table that contains the most of the names, and the names that decided it.

    tables: in ascending order of versions.
    """
    counts = {table.name: sum(table.find(name) is not None for name in names) for table in tables}
    chosen = max(tables, key=lambda table: (counts[table.name], tables.index(table)))
    others = [table for table in tables if counts[table.name] < counts[chosen.name]]
    deciding = tuple(
        name for name in names if chosen.find(name) is not None and any(table.find(name) is None for table in others)
    )
    return chosen, tuple(sorted(deciding, key=lambda name: sum(table.find(name) is not None for table in tables)))
