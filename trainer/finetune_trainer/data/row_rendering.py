"""Renders rows as token sequences: one sequence for SFT, a chosen and a rejected one for DPO."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.chat_template.example_renderer import ExampleRenderer
from finetune_trainer.chat_template.samples import Sample
from finetune_trainer.data_sources.conversations import Conversation, parse_example
from finetune_trainer.data_sources.messages import Role
from finetune_trainer.data_sources.preferences import parse_preference
from finetune_trainer.data_sources.readers import Row

RenderedRow = tuple[Sample, ...]  # one sequence for SFT; the chosen and the rejected sequence for DPO


@dataclass(frozen=True)
class RowRenderer:
    """Renders a row into the sequences of a training method; `name` identifies it in the cache key."""

    name: str
    render: Callable[[ExampleRenderer, Row], RenderedRow]


def select_row_renderer(spec: TrainerSpec) -> RowRenderer:
    """Return the row renderer for the training method of the spec."""
    if spec.sft is None:
        return RowRenderer("dpo", render_dpo_row)
    return build_sft_renderer(spec.sft.loss_on)


def build_sft_renderer(loss_on: str) -> RowRenderer:
    """Return the SFT row renderer for a value of spec.sft.lossOn."""
    return RowRenderer(f"sft {loss_on}", partial(render_sft_row, loss_on=loss_on))


def render_sft_row(renderer: ExampleRenderer, row: Row, *, loss_on: str) -> RenderedRow:
    """Render a row into one sequence.

    loss_on: `assistant`, `lastTurn` or `all`, as spec.sft.lossOn. The completion of a row with prompt and completion
    counts as its only assistant turn. Raises: DatasetError or ChatTemplateError.
    """
    example = parse_example(row)
    if loss_on == "lastTurn" and isinstance(example, Conversation):
        last = max(index for index, turn in enumerate(example.turns) if turn.role is Role.ASSISTANT)
        turns = (turn if index == last else replace(turn, weight=0.0) for index, turn in enumerate(example.turns))
        example = replace(example, turns=tuple(turns))
    sample = renderer.render(example)
    if loss_on == "all":
        sample = replace(sample, weights=_build_text_weights(sample))
    return (sample,)


def render_dpo_row(renderer: ExampleRenderer, row: Row) -> RenderedRow:
    """Render a row into its chosen and its rejected sequence. Raises: DatasetError or ChatTemplateError."""
    preference = parse_preference(row)
    return renderer.render(preference.chosen), renderer.render(preference.rejected)


def _build_text_weights(sample: Sample) -> list[float]:
    """Return weight 1 for each text token, and 0 for placeholders and the first token, which is not predicted."""
    weights = [0.0, *[1.0] * (len(sample.input_ids) - 1)]
    for placeholder in sample.placeholders:
        weights[placeholder.start : placeholder.end] = [0.0] * (placeholder.end - placeholder.start)
    return weights
