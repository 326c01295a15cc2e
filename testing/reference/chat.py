"""Renders rows as tokens with loss weights, by rules of its own: no template engine and no code of the trainer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from testing.reference.combination import Combination

END = "<|im_end|>"  # end of a turn and of a text
Row = Mapping[str, Any]
Segment = tuple[str, float]  # text and the loss weight of its tokens


@dataclass(frozen=True)
class TokenSequence:
    """Token ids and their loss weights; the weight of a token applies to its prediction from the tokens before it."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def target_count(self) -> int:
        """Number of tokens that are learned."""
        return sum(weight > 0 for weight in self.weights)

    def extend(self, length: int) -> "TokenSequence":
        """Return the sequence with tokens at its end that are not learned, which change no token before them."""
        added = length - len(self.ids)
        return TokenSequence(self.ids + (0,) * added, self.weights + (0,) * added)


@dataclass(frozen=True)
class Dialect:
    """A chat format: the texts before and after the content of a turn by role, and the same as a template."""

    before: Mapping[str, str]
    after: Mapping[str, str]  # END is learned with an assistant's content, the text after it is not

    @property
    def template(self) -> str:
        """Jinja template of the format, for the tokenizer of the model."""
        branches = "".join(
            f"{{%- {'if' if number == 0 else 'elif'} message['role'] == '{role}' -%}}"
            f"{{{{ {self.before[role]!r} + message['content'] + {self.after[role]!r} }}}}"
            for number, role in enumerate(self.before)
        )
        prompt = f"{{%- if add_generation_prompt -%}}{{{{ {self.before['assistant']!r} }}}}{{%- endif -%}}"
        return f"{{%- for message in messages -%}}{branches}{{%- endif -%}}{{%- endfor -%}}{prompt}"


ROLES = ("system", "user", "assistant")
DIALECTS: Mapping[str, Dialect] = {
    "chatml": Dialect({role: f"<|im_start|>{role}\n" for role in ROLES}, dict.fromkeys(ROLES, f"{END}\n")),
    "instruct": Dialect(
        {"system": "[SYS] ", "user": "[INST] ", "assistant": " "},
        {"system": " [/SYS]", "user": " [/INST]", "assistant": END},
    ),
    "roles": Dialect(
        {role: f"{role.title()}: " for role in ROLES}, {"system": "\n", "user": "\n", "assistant": f"{END}\n\n"}
    ),
}


def render_row(row: Row, tokenizer: Tokenizer, options: Combination) -> tuple[TokenSequence, ...] | None:
    """Return the sequence of a row, or the chosen and the rejected one of a pair; None if the row is left out.

    A row is left out if it has no token to learn, or is longer than the maximum and not truncated.
    """
    sequences = [_tokenize(segments, tokenizer) for segments in _list_segments(row, options)]
    if options.loss_on == "all":
        sequences = [TokenSequence(each.ids, (0.0,) + (1.0,) * (len(each.ids) - 1)) for each in sequences]
    limit = options.max_length
    if limit is not None and any(len(each.ids) > limit for each in sequences):
        if options.overlong == "drop":
            return None
        sequences = [TokenSequence(each.ids[:limit], each.weights[:limit]) for each in sequences]
    return tuple(sequences) if all(each.target_count for each in sequences) else None


def _list_segments(row: Row, options: Combination) -> list[list[Segment]]:
    """Return the segments of the sequence, or of the two sequences of a pair."""
    if options.dialect == "text":
        answers = [row["chosen"], row["rejected"]] if options.is_dpo else [row["completion"]]
        return [[(row["prompt"], 0.0), (answer + END, 1.0)] for answer in answers]
    if not options.is_dpo:
        return [_render_chat(row["messages"], options)]
    *prompt, chosen = row["messages"]
    rejected = {**chosen, "content": row["rejected_response"]}
    # the turns before the two completions are the prompt, which is not learned
    return [
        _render_chat([*({**each, "weight": 0} for each in prompt), answer], options) for answer in (chosen, rejected)
    ]


def _render_chat(messages: Iterable[Row], options: Combination) -> list[Segment]:
    """Return the segments of a conversation; the content of an assistant with the end of its turn is learned."""
    messages, dialect = list(messages), DIALECTS[options.dialect]
    learned = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
    if options.loss_on == "lastTurn":
        learned = learned[-1:]
    segments: list[Segment] = []
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        weight = float(message.get("weight", 1)) if number in learned else 0.0
        end = END if role == "assistant" else ""
        rest = dialect.after[role].removeprefix(end)
        segments += [(dialect.before[role], 0.0), (content + end, weight), (rest, 0.0)]
    return segments


def _tokenize(segments: Iterable[Segment], tokenizer: Tokenizer) -> TokenSequence:
    """Tokenize the text as a whole. A token is learned if it contains a character of a learned segment."""
    encoding = tokenizer.encode("".join(text for text, _ in segments), add_special_tokens=False)
    weights = [0.0] * len(encoding.ids)
    position = 0
    for text, weight in segments:
        start, position = position, position + len(text)
        for index, (first, last) in enumerate(encoding.offsets):
            if weight and first < position and last > start:
                weights[index] = weight
    return TokenSequence(tuple(encoding.ids), (0.0, *weights[1:]))  # no token precedes the first one
