"""Tokenizes examples with the chat template and computes the loss weight of each token.

The targets are the assistant turns, including their end-of-turn tokens.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from finetune_trainer.data_sources.conversations import Conversation, Example, PromptCompletion
from finetune_trainer.data_sources.media import MediaItem
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.errors import ChatTemplateError, DatasetError
from finetune_trainer.vision.placeholders import collect_media, expand_placeholders, to_content_parts
from finetune_trainer.vision.processor import VisionProcessor

_GENERATION_TAG = "{% generation"
_ANCHOR = "⟦assistant {}⟧"  # replaces the content of an assistant turn to locate the turn in the rendered text

_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError)
_MOVE_SYSTEM_PROMPT = "move its text to the beginning of the first user turn"

Span = tuple[int, int]  # (start, end) of characters or tokens; the end is exclusive


@dataclass(frozen=True)
class PlaceholderRange:
    """Token range of the placeholders of an image or video."""

    item: MediaItem
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """Tokenized sequence with one loss weight per token; tokens with weight 0 are not targets."""

    origin: str
    input_ids: Sequence[int]
    weights: Sequence[float]
    placeholders: tuple[PlaceholderRange, ...] = ()

    def truncate(self, max_length: int) -> "Sample":
        """Keep the first `max_length` tokens, or fewer if the cut would split the placeholders of an image."""
        split_at = (span.start for span in self.placeholders if span.start < max_length < span.end)
        end = min([max_length, *split_at])
        placeholders = tuple(span for span in self.placeholders if span.end <= end)
        return replace(self, input_ids=self.input_ids[:end], weights=self.weights[:end], placeholders=placeholders)


class ExampleRenderer:
    """Renders examples with the tokenizer and the vision processor of a model."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, model_name: str, vision: VisionProcessor | None = None
    ) -> None:
        if not tokenizer.is_fast:
            raise ChatTemplateError(
                f'model "{model_name}": its tokenizer ({type(tokenizer).__name__}) cannot map tokens to text, which the'
                " loss mask needs; add a tokenizer.json to the model"
            )
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._vision = vision
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        self._end_of_turn_tokens = tuple(sorted(added, key=len, reverse=True))

    def render(self, example: Example) -> Sample:
        """Tokenize the example and compute its loss weights.

        Raises: ChatTemplateError if the chat template is missing, rejects the conversation or prevents locating its
        assistant turns; DatasetError if the media of the example cannot be used.
        """
        # Prompt and completion are plain text and need no template.
        if isinstance(example, PromptCompletion):
            return self._render_prompt_completion(example)
        # Check that the model has a chat template and supports the media of the conversation.
        template = self._tokenizer.chat_template
        if not template:
            raise ChatTemplateError(
                f'{example.origin} is a conversation, but the tokenizer of model "{self._model_name}" has no chat'
                " template; train the instruct variant of the model, add chat_template.jinja to it, or provide rows"
                " with prompt and completion"
            )
        if self._vision is None and any(turn.media for turn in example.turns):
            raise DatasetError(
                f'{example.origin} contains images, but model "{self._model_name}" accepts text only; choose a'
                " vision-language model, or remove the images"
            )
        # If the template marks assistant text, use its mask.
        if self._vision is None and _GENERATION_TAG in str(template).replace("{%-", "{%"):
            return self._render_with_assistant_masks(example)
        # Otherwise locate the assistant turns in the rendered text (decisions/505).
        text = self._render_turns(example, example.turns)
        self._check_system_prompt(example, text)
        spans = self._locate_turns_by_anchors(example, text)
        if spans is None:
            spans = self._locate_turns_by_prefixes(example, text)
        sample = self._tokenize_conversation(example, text, spans)
        # Append a missing end token to the last assistant turn, so that the model learns to stop (decisions/505).
        if example.turns[-1].role is Role.ASSISTANT and not text.rstrip().endswith(self._end_of_turn_tokens):
            return self._append_eos(sample, weight=example.turns[-1].weight)
        return sample

    def _tokenize_conversation(self, example: Conversation, text: str, spans: Sequence[Span]) -> Sample:
        if self._vision is None:
            return self._tokenize(example.origin, text, spans, _get_assistant_weights(example))
        expanded = expand_placeholders(self._vision, example.origin, text, spans, collect_media(example.turns))
        return self._tokenize(
            example.origin, expanded.text, expanded.spans, _get_assistant_weights(example), media=expanded.media
        )

    def _render_prompt_completion(self, example: PromptCompletion) -> Sample:
        sample = self._tokenize(
            example.origin,
            example.prompt + example.completion,
            ((len(example.prompt), len(example.prompt) + len(example.completion)),),
            (1.0,),
            add_special_tokens=True,
        )
        return self._append_eos(sample, weight=1.0)

    def _append_eos(self, sample: Sample, *, weight: float) -> Sample:
        """Append the EOS token with `weight`, or set its weight if the tokenizer has already appended it."""
        eos = self._tokenizer.eos_token_id
        input_ids, weights = list(sample.input_ids), list(sample.weights)
        if eos is None:
            return sample
        if input_ids and input_ids[-1] == eos:
            input_ids, weights = input_ids[:-1], weights[:-1]
        return replace(sample, input_ids=[*input_ids, eos], weights=[*weights, weight])

    def _check_system_prompt(self, example: Conversation, text: str) -> None:
        """Raise ChatTemplateError if the text does not contain the system prompt.

        Some templates render the system prompt only with a generation prompt; training would silently omit it.
        """
        for turn in example.turns:
            if turn.role is Role.SYSTEM and turn.content.strip() not in text:
                raise ChatTemplateError(
                    f'{example.origin}: the chat template of model "{self._model_name}" does not support a system'
                    f" prompt (it leaves it out); {_MOVE_SYSTEM_PROMPT}"
                )

    def _render_with_assistant_masks(self, example: Conversation) -> Sample:
        """Render and tokenize the example with a template that marks assistant text with `generation` tags."""
        rendered = self._render_turns(
            example, example.turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask: list[int] = rendered["assistant_masks"]
        weights = _get_assistant_weights(example)
        starts = [index for index, marked in enumerate(mask) if marked and not (index and mask[index - 1])]
        if len(starts) != len(weights):
            if len(set(weights)) > 1:
                raise ChatTemplateError(
                    f'{example.origin}: the chat template of model "{self._model_name}" marks {len(starts)} of'
                    f" {len(weights)} assistant turns, so their weights cannot be assigned; give all of them the same"
                    " weight"
                )
            weights = weights[:1] * len(starts)
        turn_numbers = itertools.accumulate(index in set(starts) for index in range(len(mask)))
        token_weights = [
            weights[number - 1] if marked else 0.0 for marked, number in zip(mask, turn_numbers, strict=True)
        ]
        return Sample(example.origin, rendered["input_ids"], _clear_first_weight(token_weights))

    def _locate_turns_by_anchors(self, example: Conversation, text: str) -> tuple[Span, ...] | None:
        """Locate the assistant turns by rendering anchors in place of their contents.

        Returns None if replacing the anchors with the contents does not reproduce `text`, because the template rewrites
        the contents.
        """
        anchors = [
            _ANCHOR.format(index) if turn.role is Role.ASSISTANT else None for index, turn in enumerate(example.turns)
        ]
        pairs = zip(example.turns, anchors, strict=True)
        turns = [replace(turn, content=anchor) if anchor else turn for turn, anchor in pairs]
        anchored_text = self._render_turns(example, turns)
        for normalize in (lambda content: content, str.strip):
            rebuilt, spans, remaining = "", [], anchored_text
            for turn, anchor in zip(example.turns, anchors, strict=True):
                if anchor is None:
                    continue
                before, separator, remaining = remaining.partition(anchor)
                if not separator:
                    return None
                start = len(rebuilt) + len(before)
                rebuilt += before + normalize(turn.content)
                spans.append((start, len(rebuilt) + self._measure_end_of_turn(remaining)))
            if rebuilt + remaining == text:
                return tuple(spans)
        return None

    def _measure_end_of_turn(self, text: str) -> int:
        """Return the length of an end-of-turn token at the start of `text` and the whitespace before it, or 0."""
        whitespace = len(text) - len(text.lstrip())
        for token in self._end_of_turn_tokens:
            if token and text.startswith(token, whitespace):
                return whitespace + len(token)
        return 0

    def _locate_turns_by_prefixes(self, example: Conversation, text: str) -> tuple[Span, ...]:
        """Locate the assistant turns by rendering the conversation up to each assistant turn.

        The rendered text of the first turns must be a prefix of the rendered text of all turns.
        """
        spans = []
        for index, turn in enumerate(example.turns):
            if turn.role is not Role.ASSISTANT:
                continue
            prompt = self._render_turns(example, example.turns[:index], add_generation_prompt=True)
            prefix = self._render_turns(example, example.turns[: index + 1]).rstrip()
            if not prefix.startswith(prompt) or not text.startswith(prefix):
                raise ChatTemplateError(
                    f'{example.origin}: the chat template of model "{self._model_name}" rewrites turn {index}'
                    " (assistant) when later turns follow, so its target tokens cannot be located; split the"
                    " conversation into rows that end with that turn, or mark the assistant's text in the template"
                    " with {% generation %}"
                )
            spans.append((len(prompt), len(prefix)))
        return tuple(spans)

    def _render_turns(self, example: Conversation, turns: Sequence[Turn], **options: Any) -> Any:
        """Render the turns with the chat template. Raises: ChatTemplateError with the origin of the row."""
        try:
            return self._apply_template(turns, **options)
        except _TEMPLATE_ERRORS as error:
            subject = f'{example.origin}: the chat template of model "{self._model_name}"'
            if self._rejects_system_prompt(turns):
                raise ChatTemplateError(
                    f"{subject} does not support a system prompt ({error}); {_MOVE_SYSTEM_PROMPT}"
                ) from error
            raise ChatTemplateError(f"{subject} rejects this row: {error}") from error

    def _apply_template(self, turns: Sequence[Turn], **options: Any) -> Any:
        content = to_content_parts if self._vision else attrgetter("content")
        messages = [{"role": turn.role.value, "content": content(turn)} for turn in turns]
        return self._tokenizer.apply_chat_template(messages, **{"tokenize": False, **options})

    def _rejects_system_prompt(self, turns: Sequence[Turn]) -> bool:
        """Return whether the system prompt is the reason why the template rejected the turns."""
        others = [turn for turn in turns if turn.role is not Role.SYSTEM]
        if len(others) == len(turns):
            return False
        try:
            self._apply_template(others)
        except _TEMPLATE_ERRORS:
            return False
        return True

    def _tokenize(
        self,
        origin: str,
        text: str,
        spans: Sequence[Span],
        weights: Sequence[float],
        *,
        add_special_tokens: bool = False,
        media: Sequence[tuple[MediaItem, Span]] = (),
    ) -> Sample:
        """Tokenize the text and assign the weight of each span to the tokens inside it.

        spans: character ranges in `text`.
        """
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        targets = [
            (span, _extend_over_whitespace(text, span), weight)
            for span, weight in zip(spans, weights, strict=True)
            if weight
        ]
        token_weights = [
            next((weight for span, extended, weight in targets if _is_inside(token, span, extended)), 0.0)
            for token in encoded["offset_mapping"]
        ]
        placeholders = tuple(
            PlaceholderRange(item, *_find_token_range(encoded["offset_mapping"], span)) for item, span in media
        )
        return Sample(origin, encoded["input_ids"], _clear_first_weight(token_weights), placeholders)


def _get_assistant_weights(example: Conversation) -> tuple[float, ...]:
    """Return the loss weight of each assistant turn."""
    return tuple(turn.weight for turn in example.turns if turn.role is Role.ASSISTANT)


def _clear_first_weight(weights: list[float]) -> list[float]:
    """Return the weights with the first set to 0, because no earlier token predicts the first token."""
    return [0.0, *weights[1:]]


def _extend_over_whitespace(text: str, span: Span) -> Span:
    """Extend the span to include adjacent whitespace, because a token may contain whitespace of the template."""
    start, end = span
    return len(text[:start].rstrip()), len(text) - len(text[end:].lstrip())


def _is_inside(token_span: Span, span: Span, extended_span: Span) -> bool:
    """Return whether the token overlaps the span and lies within the extended span."""
    return (
        token_span[1] > span[0]
        and token_span[0] < span[1]
        and token_span[0] >= extended_span[0]
        and token_span[1] <= extended_span[1]
    )


def _find_token_range(offsets: Sequence[Span], span: Span) -> Span:
    """Return the range of tokens that overlap the character span."""
    indices = [index for index, (start, end) in enumerate(offsets) if start < span[1] and end > span[0]]
    return indices[0], indices[-1] + 1
