"""From an example to tokens and their weights in the loss: the assistant's words and its end of turn, nothing else."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from finetune_trainer.data_sources.conversations import Completion, Conversation, Example, Role, Turn
from finetune_trainer.data_sources.media import Picture
from finetune_trainer.errors import ChatTemplateError, DatasetError
from finetune_trainer.vision.placeholders import as_parts, expand, pictures_of
from finetune_trainer.vision.processor import Vision

_GENERATION_MARK = "{% generation"
_ANCHOR = "⟦assistant {}⟧"  # stands for the assistant's words while the template's own text is found

_REFUSALS = (TemplateError, TypeError, ValueError, KeyError)
_NO_SYSTEM_PROMPT = "put its words at the beginning of the first user turn"

Span = tuple[int, int]


@dataclass(frozen=True)
class Shown:
    """An image, and the tokens that stand for it."""

    picture: Picture
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One sequence: token ids, and for each its weight in the loss; 0 is not learned."""

    place: str
    tokens: Sequence[int]
    weights: Sequence[float]
    shown: tuple[Shown, ...] = ()

    def beginning(self, limit: int) -> "Sample":
        """At most so many tokens; an image is there whole or not at all."""
        limit = min([limit, *(image.start for image in self.shown if image.start < limit < image.end)])
        shown = tuple(image for image in self.shown if image.end <= limit)
        return replace(self, tokens=self.tokens[:limit], weights=self.weights[:limit], shown=shown)


class Renderer:
    """Renders examples with one tokenizer; with images, if the model sees."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, model_name: str, vision: Vision | None = None) -> None:
        if not tokenizer.is_fast:
            raise ChatTemplateError(
                f'model "{model_name}": its tokenizer ({type(tokenizer).__name__}) cannot map tokens to text, which the'
                " loss mask needs; add a tokenizer.json to the model"
            )
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._vision = vision
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        self._ends_of_turn = tuple(sorted(added, key=len, reverse=True))

    def render(self, example: Example) -> Sample:
        if isinstance(example, Completion):
            return self._render_completion(example)
        template = self._tokenizer.chat_template
        if not template:
            raise ChatTemplateError(
                f'{example.place} is a conversation, but the tokenizer of model "{self._model_name}" has no chat'
                " template; train the instruct variant of the model, add chat_template.jinja to it, or give rows with"
                " prompt and completion"
            )
        if self._vision is None and any(turn.pictures for turn in example.turns):
            raise DatasetError(
                f'{example.place} shows images, but model "{self._model_name}" only reads; choose a model that sees, or'
                " take the images out"
            )
        if self._vision is None and _GENERATION_MARK in str(template).replace("{%-", "{%"):
            return self._render_marked(example)
        text = self._apply(example, example.turns)
        self._expect_system_prompt(example, text)
        spans = self._anchored_spans(example, text)
        if spans is None:
            spans = self._prefix_spans(example, text)
        sample = self._tokenize_conversation(example, text, spans)
        if example.turns[-1].role is Role.ASSISTANT and not text.rstrip().endswith(self._ends_of_turn):
            return self._ended(sample, weight=example.turns[-1].weight)
        return sample

    def _tokenize_conversation(self, example: Conversation, text: str, spans: Sequence[Span]) -> Sample:
        if self._vision is None:
            return self._tokenize(example.place, text, spans, _answer_weights(example))
        written = expand(self._vision, example.place, text, spans, pictures_of(example.turns))
        return self._tokenize(
            example.place, written.text, written.spans, _answer_weights(example), images=written.images
        )

    def _render_completion(self, example: Completion) -> Sample:
        sample = self._tokenize(
            example.place,
            example.prompt + example.completion,
            ((len(example.prompt), len(example.prompt) + len(example.completion)),),
            (1.0,),
            add_special_tokens=True,
        )
        return self._ended(sample, weight=1.0)

    def _ended(self, sample: Sample, *, weight: float) -> Sample:
        """With the token that ends a text, learned; some tokenizers put it there themselves."""
        end = self._tokenizer.eos_token_id
        tokens, weights = list(sample.tokens), list(sample.weights)
        if end is None:
            return sample
        if tokens and tokens[-1] == end:
            tokens, weights = tokens[:-1], weights[:-1]
        return replace(sample, tokens=[*tokens, end], weights=[*weights, weight])

    def _expect_system_prompt(self, example: Conversation, text: str) -> None:
        """Some templates read it only where an answer is asked for, and train without it in silence."""
        for turn in example.turns:
            if turn.role is Role.SYSTEM and turn.content.strip() not in text:
                raise ChatTemplateError(
                    f'{example.place}: the chat template of model "{self._model_name}" takes no system prompt (it'
                    f" leaves it out); {_NO_SYSTEM_PROMPT}"
                )

    def _render_marked(self, example: Conversation) -> Sample:
        """The template itself says what the assistant generates."""
        rendered = self._apply(
            example, example.turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        marks: list[int] = rendered["assistant_masks"]
        weights = _answer_weights(example)
        starts = [index for index, mark in enumerate(marks) if mark and not (index and marks[index - 1])]
        if len(starts) != len(weights):
            if len(set(weights)) > 1:
                raise ChatTemplateError(
                    f'{example.place}: the chat template of model "{self._model_name}" marks {len(starts)} answers of'
                    f" {len(weights)}, so that their weights cannot be told apart; give every answer the same weight"
                )
            weights = weights[:1] * len(starts)
        answer = itertools.accumulate(index in set(starts) for index in range(len(marks)))
        told = [weights[number - 1] if mark else 0.0 for mark, number in zip(marks, answer, strict=True)]
        return Sample(example.place, rendered["input_ids"], _nothing_before(told))

    def _anchored_spans(self, example: Conversation, text: str) -> tuple[Span, ...] | None:
        """Render with anchors in place of the assistant's words: what lies between them is the template's own text.

        None if the words put back do not give the real text: the template rewrites them.
        """
        anchors = [
            _ANCHOR.format(index) if turn.role is Role.ASSISTANT else None for index, turn in enumerate(example.turns)
        ]
        pairs = zip(example.turns, anchors, strict=True)
        turns = [replace(turn, content=anchor) if anchor else turn for turn, anchor in pairs]
        frame = self._apply(example, turns)
        for words in (lambda content: content, str.strip):
            rebuilt, spans, rest = "", [], frame
            for turn, anchor in zip(example.turns, anchors, strict=True):
                if anchor is None:
                    continue
                before, found, rest = rest.partition(anchor)
                if not found:
                    return None
                start = len(rebuilt) + len(before)
                rebuilt += before + words(turn.content)
                spans.append((start, len(rebuilt) + self._end_of_turn(rest)))
            if rebuilt + rest == text:
                return tuple(spans)
        return None

    def _end_of_turn(self, rest: str) -> int:
        """Length of the end-of-turn token that follows the assistant's words, with the blanks before it; else 0."""
        blanks = len(rest) - len(rest.lstrip())
        for token in self._ends_of_turn:
            if token and rest.startswith(token, blanks):
                return blanks + len(token)
        return 0

    def _prefix_spans(self, example: Conversation, text: str) -> tuple[Span, ...]:
        """From the end of the prompt to the end of the turn, for templates whose text only ever grows."""
        spans = []
        for index, turn in enumerate(example.turns):
            if turn.role is not Role.ASSISTANT:
                continue
            prompt = self._apply(example, example.turns[:index], add_generation_prompt=True)
            until = self._apply(example, example.turns[: index + 1]).rstrip()
            if not until.startswith(prompt) or not text.startswith(until):
                raise ChatTemplateError(
                    f'{example.place}: the chat template of model "{self._model_name}" rewrites turn {index} (the'
                    " assistant's) when later turns follow, so the words to learn cannot be told from the rest; split"
                    " the conversation into rows that end with that turn, or mark the assistant's text in the template"
                    " with {% generation %}"
                )
            spans.append((len(prompt), len(until)))
        return tuple(spans)

    def _apply(self, example: Conversation, turns: Sequence[Turn], **options: Any) -> Any:
        try:
            return self._fill_in(turns, **options)
        except _REFUSALS as error:
            said = f'{example.place}: the chat template of model "{self._model_name}"'
            if self._minds_the_system_prompt(turns):
                raise ChatTemplateError(f"{said} takes no system prompt ({error}); {_NO_SYSTEM_PROMPT}") from error
            raise ChatTemplateError(f"{said} refuses this row: {error}") from error

    def _fill_in(self, turns: Sequence[Turn], **options: Any) -> Any:
        content = as_parts if self._vision else attrgetter("content")
        messages = [{"role": turn.role.value, "content": content(turn)} for turn in turns]
        return self._tokenizer.apply_chat_template(messages, **{"tokenize": False, **options})

    def _minds_the_system_prompt(self, turns: Sequence[Turn]) -> bool:
        """It refuses the turns, and takes them without."""
        others = [turn for turn in turns if turn.role is not Role.SYSTEM]
        if len(others) == len(turns):
            return False
        try:
            self._fill_in(others)
        except _REFUSALS:
            return False
        return True

    def _tokenize(
        self,
        place: str,
        text: str,
        spans: Sequence[Span],
        weights: Sequence[float],
        *,
        add_special_tokens: bool = False,
        images: Sequence[tuple[Picture, Span]] = (),
    ) -> Sample:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        learned = [(span, _reach(text, span), weight) for span, weight in zip(spans, weights, strict=True) if weight]
        told = [
            next((weight for span, reach, weight in learned if _is_inside(token, span, reach)), 0.0)
            for token in encoded["offset_mapping"]
        ]
        shown = tuple(Shown(picture, *_tokens_in(encoded["offset_mapping"], span)) for picture, span in images)
        return Sample(place, encoded["input_ids"], _nothing_before(told), shown)


def _answer_weights(example: Conversation) -> tuple[float, ...]:
    """Of the assistant's turns, in their order."""
    return tuple(turn.weight for turn in example.turns if turn.role is Role.ASSISTANT)


def _nothing_before(weights: list[float]) -> list[float]:
    """The first token is never learned: nothing predicts it."""
    return [0.0, *weights[1:]]


def _reach(text: str, span: Span) -> Span:
    """The span with the blanks around it: a word may share its token with a blank of the template."""
    start, end = span
    return len(text[:start].rstrip()), len(text) - len(text[end:].lstrip())


def _is_inside(token: Span, span: Span, reach: Span) -> bool:
    """It holds something of the span, and nothing beyond but blanks."""
    return token[1] > span[0] and token[0] < span[1] and token[0] >= reach[0] and token[1] <= reach[1]


def _tokens_in(offsets: Sequence[Span], span: Span) -> Span:
    """From the first to behind the last token that holds something of the span."""
    inside = [index for index, (start, end) in enumerate(offsets) if start < span[1] and end > span[0]]
    return inside[0], inside[-1] + 1
