"""Locates the assistant turns in the text of a rendered conversation (decisions/505)."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from finetune_trainer.chat_template.anchors import AssistantText, get_content_anchor
from finetune_trainer.chat_template.conversation_template import ConversationTemplate
from finetune_trainer.chat_template.samples import Span
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.errors import ChatTemplateError

_EMPTY_REASONING = re.compile(r"\s*<think>\s*</think>\s*")


def find_end_of_turn_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the added tokens that may end a turn, longest first; closing tags such as `</think>` do not."""
    added = {
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or not str(token).startswith("</")
    }
    return tuple(sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True))


@dataclass(frozen=True)
class AssistantLocator:
    """Finds the text that the model generates in each assistant turn of a rendered conversation.

    A turn with content only begins with its content. A turn with reasoning or tool calls, or any turn if the template
    adds text before the content, begins after the generation prompt.
    """

    template: ConversationTemplate
    turns: Sequence[Turn]  # without the reasoning that the template leaves out
    text: str
    value_spans: Mapping[str, Span]  # ranges of the contents and reasoning texts in `text`, by anchor
    end_of_turn_tokens: Sequence[str]
    adds_text: bool  # whether the template adds text between the generation prompt and the content

    def locate(self) -> tuple[Span, ...]:
        """Return the range of each assistant turn; that of a turn with loss weight 0 is empty.

        Raises: ChatTemplateError if a turn cannot be located.
        """
        spans: list[Span] = []
        position = 0  # end of the last located text
        for index, turn in enumerate(self.turns):
            if turn.role is Role.ASSISTANT:
                spans.append(self._locate_turn(index, position) if turn.weight else (0, 0))
                content = self.value_spans.get(get_content_anchor(index), (0, 0))
                position = max(position, content[1], spans[-1][1])
        return tuple(spans)

    def _locate_turn(self, index: int, previous_end: int) -> Span:
        turn = self.turns[index]
        content = self.value_spans.get(get_content_anchor(index))
        has_reasoning = bool(turn.reasoning.strip() or AssistantText.split(turn).tags)
        if content and not has_reasoning and not turn.tool_calls and not self.adds_text:
            return content[0], content[1] + self._measure_end_of_turn(content[1])
        prompt = self.template.render(self.turns[:index], add_generation_prompt=True)
        start = self._find_start(index, prompt, previous_end)
        if not has_reasoning and (empty := _EMPTY_REASONING.match(self.text, start)):
            start = empty.end()
        if content and not turn.tool_calls:
            return start, content[1] + self._measure_end_of_turn(content[1])
        return start, self._find_end(index, prompt, start)

    def _find_start(self, index: int, prompt: str, previous_end: int) -> int:
        """Return the position after the generation prompt of the turn.

        prompt: the earlier turns with the generation prompt. If the template rewrites earlier turns when later turns
        follow, the generation prompt is searched after `previous_end`.
        """
        if self.text.startswith(prompt):
            return len(prompt)
        before = self.template.render(self.turns[:index])
        if self.text.startswith(before):
            return len(_get_common_prompt(prompt, self.text))
        generation_prompt = prompt.removeprefix(before)
        header = generation_prompt.partition("<think>")[0]
        position = self.text.find(header, previous_end)
        if not prompt.startswith(before) or not header.strip() or position < 0:
            raise self._build_error(index)
        return position + len(_get_common_prompt(generation_prompt, self.text[position:]))

    def _find_end(self, index: int, prompt: str, start: int) -> int:
        """Return the position after the end token of the turn.

        The turn is rendered as the last one, where the template may add text at its start, such as empty reasoning.
        """
        last_turn_text = self.template.render(self.turns[: index + 1]).rstrip()
        block = last_turn_text[len(_get_common_prompt(prompt, last_turn_text)) :]
        skipped = next((n for n in range(len(block)) if self.text.startswith(block[n:], start)), len(block))
        end = start + len(block) - skipped
        if self._get_last_text(index) not in self.text[start:end]:
            raise self._build_error(index)
        return end if last_turn_text.endswith(tuple(self.end_of_turn_tokens)) else end + self._measure_end_of_turn(end)

    def _get_last_text(self, index: int) -> str:
        """Return a text that the located range of the turn must contain."""
        turn = self.turns[index]
        if turn.tool_calls:
            return turn.tool_calls[-1].name
        return AssistantText.split(turn).content.strip() or turn.reasoning.strip()

    def _measure_end_of_turn(self, position: int) -> int:
        """Return the length of an end-of-turn token at this position and the whitespace before it, or 0."""
        following = self.text[position:]
        whitespace = len(following) - len(following.lstrip())
        for token in self.end_of_turn_tokens:
            if token and following.startswith(token, whitespace):
                return whitespace + len(token)
        return 0

    def _build_error(self, index: int) -> ChatTemplateError:
        return ChatTemplateError(
            f"{self.template.subject} rewrites turn {index} (assistant) when later turns follow, so its target tokens"
            " cannot be located; split the conversation into rows that end with that turn, or mark the assistant's"
            " text in the template with {% generation %}"
        )


def _get_common_prompt(prompt: str, text: str) -> str:
    """Return the longest prefix of the generation prompt with which the text begins, without an incomplete tag.

    The text may lack the end of the prompt: templates of reasoning models add `<think>` to the prompt only.
    """
    if text.startswith(prompt):
        return prompt
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False))
    common = "".join(character for character, _ in pairs)
    return common[: common.rindex("<")] if common.rfind("<") > common.rfind(">") else common


def adds_text_before_content(template: ConversationTemplate) -> bool:
    """Return whether the template renders text between the generation prompt and the content, as that of gpt-oss does.

    Empty reasoning and whitespace do not count.
    """
    anchor = get_content_anchor(1)
    user = Turn(Role.USER, "q")
    try:
        prompt = template.render((user,), add_generation_prompt=True)
        text = template.render((user, Turn(Role.ASSISTANT, anchor)))
        has_generation_prompt = prompt != template.render((user,))
    except ChatTemplateError:
        return False
    added = text[len(_get_common_prompt(prompt, text)) :].partition(anchor)[0]
    return has_generation_prompt and bool(_EMPTY_REASONING.sub("", added).strip())
