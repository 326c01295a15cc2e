"""Evaluates the words of a shell command: quotes, variables and constant arithmetic; anything else stays unresolved."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tree_sitter import Node

from finetune_convert.shell.ascii_text import decode_from_ascii

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_EXPR = re.compile(r"\$\(\s*expr\s+([^()`;|&<>\"']*)\)")  # the older form of $((...))
_MAX_ARITHMETIC = 200  # characters
_MAX_INTEGER = 10**12
ADDED = 0  # line of a word that the conversion adds to a command


@dataclass(frozen=True)
class Word:
    """One word of a command; `unresolved` is the part that only a shell can compute."""

    text: str
    line: int  # counted from 1, or ADDED
    unresolved: str | None = None


@dataclass
class Variables:
    """Variables of the text so far: strings and arrays."""

    scalars: dict[str, Word] = field(default_factory=dict)
    arrays: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)  # names that a word contains


@dataclass(frozen=True)
class _Piece:
    text: str
    quoted: bool
    unresolved: str | None = None
    breaks: bool = False  # a word ends before this piece


def evaluate_words(node: Node, variables: Variables) -> list[Word]:
    """Return the words into which the shell would split a node: none or several for an unquoted variable."""
    line = node.start_point.row + 1
    words: list[Word] = []
    text, unresolved, is_open = "", None, False
    for piece in _list_pieces(node, variables):
        parts = [piece.text] if piece.quoted else re.split(r"\s+", piece.text)
        for index, part in enumerate(parts):
            if (index or piece.breaks) and is_open:
                words.append(Word(text, line, unresolved))
                text, unresolved, is_open = "", None, False
            if part or piece.quoted or piece.unresolved:
                text, is_open = text + part, True
        unresolved = unresolved or piece.unresolved
    return [*words, Word(text, line, unresolved)] if is_open else words


def evaluate_text(node: Node, variables: Variables) -> Word:
    """Return the value of a node in an assignment, where nothing is split."""
    pieces = list(_list_pieces(node, variables))
    unresolved = next((piece.unresolved for piece in pieces if piece.unresolved), None)
    return Word("".join(piece.text for piece in pieces), node.start_point.row + 1, unresolved)


def get_text(node: Node) -> str:
    """Return the source text of a node."""
    return decode_from_ascii(node.text or b"")


def _list_pieces(node: Node, variables: Variables, *, quoted: bool = False) -> Iterator[_Piece]:
    match node.type:
        case "word" | "number" | "command_name" if not node.named_children:
            yield from _read_plain_word(get_text(node), quoted=quoted)
        case "string":
            if not re.search(r"\$\{\w+\[@\]\}|\$@", get_text(node)):  # "$@" is no word if it is empty
                yield _Piece("", quoted=True)
            yield from _list_string_pieces(node, variables)
        case "raw_string":
            yield _Piece(get_text(node)[1:-1], quoted=True)
        case "ansi_c_string":
            yield _Piece(get_text(node)[2:-1], quoted=True)
        case "concatenation" | "command_name":
            yield from _list_concatenated(node, variables)
        case "simple_expansion" | "expansion":
            yield from _expand(node, variables, quoted=quoted)
        case "arithmetic_expansion":
            yield _compute(node, get_text(node)[3:-2], variables)
        case "command_substitution" if match := _EXPR.fullmatch(get_text(node)):
            yield _compute(node, match[1].replace("\\*", "*"), variables)
        case _:
            yield _Piece(get_text(node), quoted=True, unresolved=get_text(node))


def _read_plain_word(text: str, *, quoted: bool) -> Iterator[_Piece]:
    is_glob = not quoted and re.search(r"(?<!\\)[*?]", text) is not None
    yield _Piece(re.sub(r"\\(.)", r"\1", text.replace("\\\n", "")), quoted=True, unresolved=text if is_glob else None)


def _list_concatenated(node: Node, variables: Variables) -> Iterator[_Piece]:
    text = get_text(node)
    if re.search(r"(?<![$\\])\{[^{}]*(,|\.\.)[^{}]*\}", text) and not re.search(r"['\"]", text):
        yield _Piece(text, quoted=True, unresolved=text)  # brace expansion
        return
    for child in node.children:
        yield from _list_pieces(child, variables)


def _list_string_pieces(node: Node, variables: Variables) -> Iterator[_Piece]:
    position = node.start_byte + 1
    for child in node.named_children:
        if child.start_byte > position:  # spaces beside an expansion are no nodes of their own
            yield _Piece(_slice(node, position, child.start_byte), quoted=True)
        if child.type == "string_content":
            yield _Piece(re.sub(r'\\([$`"\\])', r"\1", get_text(child).replace("\\\n", "")), quoted=True)
        else:
            yield from _list_pieces(child, variables, quoted=True)
        position = child.end_byte
    if node.end_byte - 1 > position:
        yield _Piece(_slice(node, position, node.end_byte - 1), quoted=True)


def _slice(node: Node, start: int, end: int) -> str:
    return decode_from_ascii((node.text or b"")[start - node.start_byte : end - node.start_byte])


def _expand(node: Node, variables: Variables, *, quoted: bool) -> Iterator[_Piece]:
    source = get_text(node)
    if array := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", source):
        for word in variables.arrays.get(array[1], ()):
            yield _Piece(word.text, quoted=True, unresolved=word.unresolved, breaks=True)
        if array[1] not in variables.arrays:
            yield _Piece(source, quoted=True, unresolved=source)
        return
    match = re.fullmatch(r"\$\{?(\w+|[@*#?])\}?|\$\{(\w+)(?::?[-=])([^{}$`]*)\}", source)
    if match is None:
        yield _Piece(source, quoted=True, unresolved=source)
        return
    name, default = match[1] or match[2], match[3]
    variables.used.add(name)
    if name in variables.scalars:
        word = variables.scalars[name]
        yield _Piece(word.text, quoted=quoted or word.unresolved is not None, unresolved=word.unresolved)
    elif default is not None:
        yield _Piece(default.strip("'\""), quoted=quoted)
    elif name not in ("@", "*"):  # the arguments of the script, which the text does not contain
        yield _Piece(source, quoted=True, unresolved=source)


def _compute(node: Node, expression: str, variables: Variables) -> _Piece:
    source = get_text(node)
    numbers = {name: word.text for name, word in variables.scalars.items() if not word.unresolved}
    variables.used |= set(re.findall(r"[A-Za-z_]\w*", expression))
    value = compute_arithmetic(expression, numbers)
    return _Piece(source if value is None else str(value), quoted=True, unresolved=source if value is None else None)


def compute_arithmetic(expression: str, numbers: Mapping[str, str]) -> int | None:
    """Return the value of an expression of integers with + - * / %, or None if it is not constant."""
    expression = re.sub(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)\b", lambda m: numbers.get(m[1] or m[2], "?"), expression)
    if len(expression) > _MAX_ARITHMETIC or not re.fullmatch(r"[\d\s+*/%()-]+", expression) or "**" in expression:
        return None
    try:
        return _compute_tree(ast.parse(expression.replace("//", "?").replace("/", "//").strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _compute_tree(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            result = value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_compute_tree(left), _compute_tree(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_compute_tree(operand)
        case _:
            raise ValueError("not constant")
    if abs(result) > _MAX_INTEGER:
        raise ValueError("too large")
    return result
