"""Renders and tokenizes examples, and computes the loss weight of each token.

The targets are the assistant turns, including their end-of-turn tokens.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune_trainer.chat_template.anchors import AnchoredTurns, AssistantText
from finetune_trainer.chat_template.assistant_spans import (
    AssistantLocator,
    adds_text_before_content,
    find_end_of_turn_tokens,
)
from finetune_trainer.chat_template.conversation_template import ConversationTemplate, list_template_names
from finetune_trainer.chat_template.rendered_fields import (
    OMITTED_REASONING,
    check_context,
    find_omitted_reasoning,
    select_argument_format,
)
from finetune_trainer.chat_template.samples import (
    SPANNING_TOKEN,
    Sample,
    Span,
    WeightedText,
    clear_first_weight,
    tokenize_text,
)
from finetune_trainer.data_sources.conversations import Conversation, Example, PromptCompletion
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.errors import ChatTemplateError, DatasetError
from finetune_trainer.vision.placeholders import collect_media, expand_placeholders, requires_content_parts
from finetune_trainer.vision.processor import VisionProcessor

_GENERATION_TAG = "{% generation"


class ExampleRenderer:
    """Renders examples with the tokenizer and the vision processor of a model.

    template_kwargs: variables for the chat template, which those of a conversation override.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_name: str,
        vision: VisionProcessor | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise ChatTemplateError(
                f'model "{model_name}": its tokenizer ({type(tokenizer).__name__}) cannot map tokens to text, which the'
                " loss mask needs; add a tokenizer.json to the model"
            )
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._vision = vision
        self._uses_content_parts = vision is not None or requires_content_parts(tokenizer)
        self._template_kwargs = template_kwargs or {}
        self._end_of_turn_tokens = find_end_of_turn_tokens(tokenizer)
        self._adds_text: bool | None = None  # determined with the first conversation

    def render(self, example: Example) -> Sample:
        """Tokenize the example and compute its loss weights.

        Raises: ChatTemplateError if the chat template is missing, rejects the conversation, leaves out a part of it or
        prevents locating its assistant turns; DatasetError if the media of the example cannot be used.
        """
        # Prompt and completion are plain text and need no template.
        if isinstance(example, PromptCompletion):
            return self._render_prompt_completion(example)
        # Check that the model has a chat template and supports the media of the conversation.
        template_text = self._get_template_text(example)
        if self._vision is None and any(turn.media for turn in example.turns):
            raise DatasetError(
                f'{example.origin} contains images, but model "{self._model_name}" is trained on text only; remove'
                " the images, or choose a vision-language model and leave spec.model.textOnly out"
            )
        # Render the conversation, and check that the text contains all of it.
        template = self._build_template(example)
        text = template.render(example.turns)
        check_context(template, example.turns, text)
        anchored = AnchoredTurns.build(example.turns)
        anchored_text = template.render(anchored.turns)
        omitted = find_omitted_reasoning(template, example.turns, text, anchored_text)
        notes = (*example.notes, *((OMITTED_REASONING,) if omitted else ()))
        # If the template marks assistant text, use its mask.
        if self._vision is None and _GENERATION_TAG in template_text.replace("{%-", "{%"):
            return replace(self._render_with_assistant_masks(example, template), notes=notes)
        # Otherwise locate the assistant turns in the rendered text (decisions/505).
        spans = AssistantLocator(
            template,
            [_remove_reasoning(turn) if index in omitted else turn for index, turn in enumerate(example.turns)],
            text,
            anchored.locate(text, anchored_text) or {},
            self._end_of_turn_tokens,
            self._check_added_text(template),
        ).locate()
        sample = replace(self._tokenize_conversation(example, text, spans), notes=notes)
        # Append a missing end token to the last assistant turn, so that the model learns to stop (decisions/505).
        if example.turns[-1].role is Role.ASSISTANT and not text.rstrip().endswith(self._end_of_turn_tokens):
            return self._append_eos(sample, weight=example.turns[-1].weight)
        return sample

    def _get_template_text(self, example: Conversation) -> str:
        """Return the chat template, and check that it reads the template variables of the conversation."""
        if not self._tokenizer.chat_template:
            raise ChatTemplateError(
                f'{example.origin} is a conversation, but the tokenizer of model "{self._model_name}" has no chat'
                " template; train the instruct variant of the model, add chat_template.jinja to it, or provide rows"
                " with prompt and completion"
            )
        template = str(self._tokenizer.get_chat_template(tools=list(example.tools) or None))
        if unknown := example.template_kwargs.keys() - list_template_names(template):
            raise ChatTemplateError(
                f'{example.origin}, column chat_template_kwargs: the chat template of model "{self._model_name}" has no'
                f" variable {min(unknown)}; correct its name, or remove it"
            )
        return template

    def _build_template(self, example: Conversation) -> ConversationTemplate:
        template = ConversationTemplate.build(
            self._tokenizer,
            example,
            model_name=self._model_name,
            kwargs=self._template_kwargs,
            as_content_parts=self._uses_content_parts,
        )
        return select_argument_format(template, example.turns)

    def _check_added_text(self, template: ConversationTemplate) -> bool:
        if self._adds_text is None:
            self._adds_text = adds_text_before_content(template.without_tools())
        return self._adds_text

    def _tokenize_conversation(self, example: Conversation, text: str, spans: Sequence[Span]) -> Sample:
        weights = _get_assistant_weights(example)
        if self._vision is None:
            return tokenize_text(self._tokenizer, example.origin, WeightedText(text, spans, weights))
        expanded = expand_placeholders(self._vision, example.origin, text, spans, collect_media(example.turns))
        content = WeightedText(expanded.text, expanded.spans, weights, expanded.media)
        return tokenize_text(self._tokenizer, example.origin, content)

    def _render_prompt_completion(self, example: PromptCompletion) -> Sample:
        """Tokenize plain text. Every token with a character of the completion is a target (decisions/505)."""
        encoded = self._tokenizer(example.prompt + example.completion, return_offsets_mapping=True)
        border, last = len(example.prompt), len(example.prompt.rstrip())
        ranges = encoded["offset_mapping"]
        weights = clear_first_weight([float(end > border) for _, end in ranges])
        notes = (SPANNING_TOKEN,) if any(start < last and border < end for start, end in ranges) else ()
        return self._append_eos(Sample(example.origin, encoded["input_ids"], weights, notes=notes), weight=1.0)

    def _append_eos(self, sample: Sample, *, weight: float) -> Sample:
        """Append the EOS token with `weight`, or set its weight if the tokenizer has already appended it."""
        eos = self._tokenizer.eos_token_id
        input_ids, weights = list(sample.input_ids), list(sample.weights)
        if eos is None:
            return sample
        if input_ids and input_ids[-1] == eos:
            input_ids, weights = input_ids[:-1], weights[:-1]
        return replace(sample, input_ids=[*input_ids, eos], weights=[*weights, weight])

    def _render_with_assistant_masks(self, example: Conversation, template: ConversationTemplate) -> Sample:
        """Render and tokenize the example with a template that marks assistant text with `generation` tags."""
        rendered = template.render(example.turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask: list[int] = rendered["assistant_masks"]
        weights = _get_assistant_weights(example)
        starts = [index for index, marked in enumerate(mask) if marked and not (index and mask[index - 1])]
        if len(starts) != len(weights):
            if len(set(weights)) > 1:
                raise ChatTemplateError(
                    f"{template.subject} marks {len(starts)} of {len(weights)} assistant turns, so their weights cannot"
                    " be assigned; give all of them the same weight"
                )
            weights = weights[:1] * len(starts)
        turn_numbers = itertools.accumulate(index in set(starts) for index in range(len(mask)))
        token_weights = [
            weights[number - 1] if marked else 0.0 for marked, number in zip(mask, turn_numbers, strict=True)
        ]
        return Sample(example.origin, rendered["input_ids"], clear_first_weight(token_weights))


def _get_assistant_weights(example: Conversation) -> tuple[float, ...]:
    """Return the loss weight of each assistant turn."""
    return tuple(turn.weight for turn in example.turns if turn.role is Role.ASSISTANT)


def _remove_reasoning(turn: Turn) -> Turn:
    """Return the turn without its reasoning and the tags around it."""
    return replace(turn, reasoning="", content=AssistantText.split(turn).content)
