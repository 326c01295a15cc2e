"""Applies a table of rules to the options of a tool: each becomes a field of the job, or an entry with a reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from finetune_convert.conversion import ConversionError, Entry, EntryEffect
from finetune_convert.job_draft import JobDraft
from finetune_convert.option_table import Option, OptionTable
from finetune_convert.secret_values import is_secret, name_variable

OFF: tuple[Any, ...] = (None, False, "", "false", "none", "no", 0, [], {})


class Unconvertible(ConversionError):
    """Raised by a converter for a value that the field cannot express; the message is the reason."""

    def __init__(self, reason: str, *, needs_program: bool = True) -> None:
        super().__init__(reason)
        self.needs_program = needs_program


@dataclass(frozen=True)
class Given:
    """An option in the input: its parsed value, its text, and the line of the input."""

    name: str
    value: Any
    text: str
    line: int | None = None
    unresolved: str | None = None


@dataclass(frozen=True)
class ToField:
    """The option is a field of the job. A converter that returns None leaves the field out.

    stated: the tool's default is written to the job if it differs from `ours`, the default of the field.
    """

    path: str
    convert: Callable[[Any], Any] = lambda value: value
    stated: bool = False
    ours: Any = None


@dataclass(frozen=True)
class Fixed:
    """The job's trainer always behaves as with the value `ours`; another value changes the training."""

    ours: Any
    reason: str
    needs_program: bool = False


@dataclass(frozen=True)
class Unused:
    """The option has no effect on the result of the job."""

    reason: str


@dataclass(frozen=True)
class NeedsCheck:
    """The job has no such option, and the user has to check that its own behaviour is the same."""

    reason: str


@dataclass(frozen=True)
class NeedsProgram:
    """The job's trainer does not have this; an option that is not off needs the original program."""

    reason: str
    off: tuple[Any, ...] = ()  # additional values that mean off


@dataclass(frozen=True)
class ToSecret:
    """The option is a token, which the job reads from a Secret as this variable; None: it is not needed."""

    variable: str | None


Rule = ToField | Fixed | Unused | NeedsCheck | NeedsProgram | ToSecret


def group(rule: Rule, names: str) -> dict[str, Rule]:
    """Return the rule for each of the names or patterns, which are separated by spaces."""
    return dict.fromkeys(names.split(), rule)


@dataclass
class Options:
    """The options of the input, with the defaults of the tool."""

    table: OptionTable
    command: str
    given: dict[str, Given] = field(default_factory=dict)
    computed: dict[str, Any] = field(default_factory=dict)  # defaults that the tool computes

    def get(self, name: str) -> Any:
        """Return the value in the input, otherwise the default of the tool; None if the tool has no such option."""
        if name in self.given:
            return self.given[name].value
        if name in self.computed:
            return self.computed[name]
        option = self.table.options.get(name)
        return option.get_default(self.command) if option else None

    def get_first(self, *names: str) -> Any:
        """Return the value of the first name that is in the input, otherwise the default of the last."""
        return next((self.given[name].value for name in names if name in self.given), self.get(names[-1]))

    def get_line(self, *names: str) -> int | None:
        """Return the line of the first name that is in the input."""
        return next((self.given[name].line for name in names if name in self.given), None)

    def has(self, *names: str) -> bool:
        """Return whether one of the options is in the input."""
        return any(name in self.given for name in names)


def find_rule(rules: Mapping[str, Rule], name: str) -> Rule | None:
    """Return the rule of an option: by name, otherwise by the first pattern that matches."""
    if name in rules:
        return rules[name]
    return next((rule for pattern, rule in rules.items() if "*" in pattern and fnmatchcase(name, pattern)), None)


def find_program_reasons(options: Options, rules: Mapping[str, Rule]) -> list[tuple[Given, str]]:
    """Return the options of the input that need the original program, with the reason."""
    return [
        (given, reason)
        for name, given in options.given.items()
        if (reason := _explain_need(given, find_rule(rules, name), options.table.options.get(name), options.command))
    ]


def _explain_need(given: Given, rule: Rule | None, option: Option | None, command: str) -> str | None:
    default = option.get_default(command) if option else None
    match rule:
        case NeedsProgram(reason, off) if given.value not in (*OFF, *off) and given.value != default:
            return reason
        case Fixed(ours, reason, needs_program=True) if not _is_equal(given.value, ours):
            return reason
        case ToField(convert=convert):
            try:
                convert(given.value)
            except Unconvertible as error:
                return str(error) if error.needs_program else None
    return None


def list_unknown(options: Options, tool: str) -> list[Entry]:
    """Return an entry with the most similar option for each option that the tool does not have."""
    entries = []
    for name, given in options.given.items():
        if name not in options.table.options:
            nearest = options.table.find_nearest(name)
            hint = f"; did you mean {nearest}?" if nearest else ""
            entries.append(Entry(name, EntryEffect.UNKNOWN, f"{tool} has no such option{hint}", line=given.line))
    return entries


def apply_rules(options: Options, rules: Mapping[str, Rule], draft: JobDraft, *, tool: str) -> None:
    """Convert all options with a rule, and state defaults of the tool that differ.

    An option without a rule is converted by a function of the tool, usually together with others.
    """
    draft.entries += list_unknown(options, tool)
    for name, given in options.given.items():
        option, rule = options.table.options.get(name), find_rule(rules, name)
        if option is not None and (is_secret(name, given.text) or isinstance(rule, ToSecret)):
            _apply_secret(given, rule, draft)
        elif option is not None:
            _apply_given(given, rule, option.get_default(options.command), draft)
    for name, option in options.table.options.items():
        if name == option.name and name not in options.given and (not option.only or options.command in option.only):
            _state_default(option.get_default(options.command), name, find_rule(rules, name), draft, tool=tool)


def _apply_secret(given: Given, rule: Rule | None, draft: JobDraft) -> None:
    variable = rule.variable if isinstance(rule, ToSecret) else name_variable(given.name)
    if variable is None:
        draft.note(
            given.name, EntryEffect.UNUSED, "the value is not copied; this trainer does not use it", line=given.line
        )
    else:
        draft.add_secret(given.name, variable, line=given.line)


def _apply_given(given: Given, rule: Rule | None, default: Any, draft: JobDraft) -> None:
    match rule:
        case ToField(path, convert):
            _apply_field(given, path, convert, draft)
        case Fixed(ours, reason):
            effect = EntryEffect.SAME if _is_equal(given.value, ours) else EntryEffect.CHANGED
            draft.note(given.name, effect, reason, line=given.line)
        case Unused(reason):
            draft.note(given.name, EntryEffect.UNUSED, reason, line=given.line)
        case NeedsCheck(reason):
            draft.note(given.name, EntryEffect.EDIT, reason, line=given.line)
        case NeedsProgram(reason, off):
            is_off = given.value in (*OFF, *off) or given.value == default
            message = "off, as in this trainer" if is_off else f"{reason}; --form command keeps it"
            draft.note(given.name, EntryEffect.SAME if is_off else EntryEffect.CHANGED, message, line=given.line)


def _apply_field(given: Given, path: str, convert: Callable[[Any], Any], draft: JobDraft) -> None:
    try:
        value = convert(given.value)
    except Unconvertible as error:
        draft.note(given.name, EntryEffect.CHANGED, str(error), line=given.line)
        return
    if value is None:
        draft.note(
            given.name, EntryEffect.SAME, f"{given.text}: the default of spec.{path}", field=path, line=given.line
        )
        return
    draft.set(path, value)
    is_same = _is_equal(value, given.value)
    message = "" if is_same else f"{given.text} is {_show(value)}"
    draft.note(given.name, EntryEffect.TAKEN if is_same else EntryEffect.MAPPED, message, field=path, line=given.line)


def _state_default(value: Any, name: str, rule: Rule | None, draft: JobDraft, *, tool: str) -> None:
    match rule:
        case ToField(path, convert, stated=True, ours=ours) if value is not None:
            try:
                converted = convert(value)
            except Unconvertible as error:
                draft.note(name, EntryEffect.CHANGED, f"the default of {tool} is {_show(value)}: {error}")
                return
            if converted is not None and not _is_equal(converted, ours) and draft.get(path) is None:
                draft.set(path, converted)
                draft.note(name, EntryEffect.DEFAULT, f"the default of {tool} is {_show(value)}", field=path)
        case Fixed(ours, reason) if value is not None and not _is_equal(value, ours):
            draft.note(name, EntryEffect.CHANGED, f"the default of {tool} is {_show(value)}; {reason}")


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return list(value) == list(other)
    if isinstance(value, bool) is not isinstance(other, bool):
        return False
    return bool(value == other)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
