"""Reads shell text as a list of commands with their variables; constructs that need a shell are errors or entries."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from finetune_convert.conversion import ConversionError, Entry, EntryEffect
from finetune_convert.shell.ascii_text import encode_as_ascii
from finetune_convert.shell.words import Variables, Word, evaluate_text, evaluate_words, get_text

MAX_NODES = 200_000
MAX_NESTING = 60
_UNSUPPORTED = {
    "for_statement": "a loop",
    "c_style_for_statement": "a loop",
    "while_statement": "a loop",
    "if_statement": "a condition",
    "case_statement": "a condition",
    "function_definition": "a function",
    "subshell": "a subshell",
    "compound_statement": "a group of commands",
    "negated_command": "a negation",
    "test_command": "a condition",
}
_WRAPPERS = (
    "nohup",
    "exec",
    "time",
    "sudo",
    "env",
    "command",
    "stdbuf",
    "setsid",
    "nice",
)  # start the command after them


@dataclass(frozen=True)
class ShellCommand:
    """A command with the variables in its environment: exported ones, and those set in front of it."""

    words: tuple[Word, ...]
    environment: dict[str, Word]
    directory: Word | None  # of the last `cd`

    @property
    def line(self) -> int:
        """Line of the first word, counted from 1."""
        return self.words[0].line


@dataclass
class ShellScript:
    """All commands of a text, and entries for the parts that are not commands."""

    commands: list[ShellCommand] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    variables: Variables = field(default_factory=Variables)
    directory: Word | None = None


def read_script(text: str) -> ShellScript:
    """Return the commands of a shell text.

    Raises: ConversionError if the text is no shell text
    """
    source = encode_as_ascii(clean_pasted_text(text))
    root = Parser(Language(tree_sitter_bash.language())).parse(source).root_node
    _check_tree(root)
    script = ShellScript()
    for node in root.named_children:
        _read_statement(node, script)
    _report_unused_variables(script)
    return script


def _report_unused_variables(script: ShellScript) -> None:
    """Add an entry for each variable that no command reads, because it is not exported."""
    variables = script.variables
    for name, word in variables.scalars.items():
        if name not in variables.exported and name not in variables.used:
            message = "is assigned, but neither exported nor used, so that it has no effect"
            script.entries.append(Entry(name, EntryEffect.UNUSED, message, line=word.line))


def clean_pasted_text(text: str) -> str:
    """Return the text without Markdown fences, prompts and Windows line ends; the number of lines stays the same."""
    lines = text.replace("\r\n", "\n").replace("\u00a0", " ").removeprefix("\ufeff").split("\n")
    prompt = r"^(\s*)[$>] (?=\S)" if re.match(r"\s*\$ \S", text) else r"^(\s*)\$ (?=\S)"
    cleaned = []
    for line in lines:
        if line.strip().startswith("```"):
            line = ""
        line = re.sub(prompt, r"\1  ", line)
        cleaned.append(re.sub(r"\\[ \t]+$", r"\\", line))  # spaces after a continuation would end the command
    return "\n".join(cleaned)


def _check_tree(root: Node) -> None:
    """Check size, nesting and syntax without recursion, because the text may be nested at will."""
    stack, count = [(root, 0)], 0
    while stack:
        node, depth = stack.pop()
        count += 1
        line = node.start_point.row + 1
        if count > MAX_NODES:
            raise ConversionError(f"line {line}: the text is too long; paste only the training command")
        if depth > MAX_NESTING:
            raise ConversionError(f"line {line}: the text is nested too deeply; paste only the training command")
        if node.is_missing or node.type == "ERROR":
            found = " ".join(get_text(node).split())[:40]
            detail = f"{node.type} is missing" if node.is_missing else f"unexpected {found!r}"
            raise ConversionError(f"line {line}: is no valid shell text: {detail}; correct the quotes and line ends")
        stack += [(child, depth + 1) for child in node.children]


def _read_statement(node: Node, script: ShellScript) -> None:
    if node.type in ("comment", "heredoc_body"):
        return
    if reader := _READERS.get(node.type):
        reader(node, script)
        return
    construct = _UNSUPPORTED.get(node.type, f"a construct of type {node.type}")
    _report_unsupported(node, construct, script)


def _read_children(node: Node, script: ShellScript) -> None:
    for child in node.named_children:
        _read_statement(child, script)


def _read_declaration(node: Node, script: ShellScript) -> None:
    is_export = get_text(node.children[0]) == "export"
    for child in node.named_children:
        if child.type == "variable_assignment":
            _assign(child, script, exported=is_export)
        elif child.type == "variable_name" and is_export:
            script.variables.exported.add(get_text(child))


def _read_unset(node: Node, script: ShellScript) -> None:
    for child in node.named_children:
        script.variables.scalars.pop(get_text(child), None)


def _report_unsupported(node: Node, construct: str, script: ShellScript) -> None:
    """Report a construct; it is a problem only if it could contain the training command."""
    line, text = node.start_point.row + 1, get_text(node)
    first = " ".join(text.split())[:60]
    if re.search(r"\b(swift|torchrun|deepspeed|accelerate|llamafactory-cli|axolotl|python3?)\b", text):
        script.problems.append(
            f"line {line}: {construct} is not run, and may start the training: {first}; paste the command itself with"
            " its values"
        )
    else:
        script.entries.append(Entry(first, EntryEffect.UNUSED, f"{construct} is not run", line=line))


def _read_redirected(node: Node, script: ShellScript) -> None:
    body, *redirects = node.named_children
    if any(child.type == "heredoc_redirect" for child in redirects):
        _report_unsupported(node, "a here-document", script)
        return
    _read_statement(body, script)
    for redirect in redirects:
        script.entries.append(
            Entry(
                get_text(redirect),
                EntryEffect.UNUSED,
                "the output of every rank is in the pod's log and in logs/ of the output",
                line=redirect.start_point.row + 1,
            )
        )


def _read_pipeline(node: Node, script: ShellScript) -> None:
    body, *others = node.named_children
    _read_statement(body, script)
    for other in others:
        message = "a pipe is not run; the output is in the pod's log and in logs/ of the output"
        script.entries.append(
            Entry(f"| {get_text(other)[:60]}", EntryEffect.UNUSED, message, line=other.start_point.row + 1)
        )


def _assign(node: Node, script: ShellScript, *, exported: bool) -> None:
    name_node, value = node.child_by_field_name("name"), node.child_by_field_name("value")
    if name_node is None:
        return
    name = get_text(name_node)
    if value is not None and value.type == "array":
        script.variables.arrays[name] = tuple(
            word for child in value.named_children for word in evaluate_words(child, script.variables)
        )
        return
    line = node.start_point.row + 1
    word = evaluate_text(value, script.variables) if value is not None else Word("", line)
    if "+=" in get_text(node)[: len(name) + 2] and name in script.variables.scalars:
        word = Word(script.variables.scalars[name].text + word.text, line, word.unresolved)
    script.variables.scalars[name] = word
    if exported:
        script.variables.exported.add(name)


def _read_command(node: Node, script: ShellScript) -> None:
    prefix: dict[str, Word] = {}
    words: list[Word] = []
    for child in node.named_children:
        if child.type == "variable_assignment":
            name, value = child.child_by_field_name("name"), child.child_by_field_name("value")
            if name is not None:
                line = child.start_point.row + 1
                prefix[get_text(name)] = evaluate_text(value, script.variables) if value else Word("", line)
        elif child.type == "herestring_redirect":
            script.problems.append(f"line {child.start_point.row + 1}: <<< is not run; remove it")
        elif child.type != "file_redirect":
            words += evaluate_words(child, script.variables)
    words = _remove_wrappers(words, prefix)
    if not words:
        script.variables.scalars |= prefix
    elif words[0].text == "cd" and len(words) == 2:
        script.directory = words[1]
    else:
        variables = script.variables
        exported = {name: word for name, word in variables.scalars.items() if name in variables.exported}
        script.commands.append(ShellCommand(tuple(words), exported | prefix, script.directory))


def _remove_wrappers(words: list[Word], prefix: dict[str, Word]) -> list[Word]:
    """Return the words without nohup, env and others; variables of env are added to the prefix."""
    while words and words[0].text in _WRAPPERS:
        words = words[1:]
        while words and (match := re.fullmatch(r"(\w+)=(.*)", words[0].text)):  # env NAME=value command
            prefix[match[1]] = Word(match[2], words[0].line, words[0].unresolved)
            words = words[1:]
    return words


_READERS: dict[str, Callable[[Node, ShellScript], None]] = {
    "variable_assignment": lambda node, script: _assign(node, script, exported=False),
    "variable_assignments": _read_children,
    "declaration_command": _read_declaration,
    "unset_command": _read_unset,
    "list": _read_children,
    "redirected_statement": _read_redirected,
    "pipeline": _read_pipeline,
    "command": _read_command,
}
