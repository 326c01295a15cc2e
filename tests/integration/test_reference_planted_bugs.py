"""Tests that the reference finds bugs that are planted into the trainer, mostly by one of the fixed combinations.

The ranks of the trainer import this module and call the function of a bug before they train the combination.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

from finetune_trainer import build_trainer, publish_result, training_arguments
from finetune_trainer.chat_template import samples
from finetune_trainer.chat_template.samples import Sample, Span
from finetune_trainer.data import collator
from finetune_trainer.data.batch_sampler import BatchSampler
from finetune_trainer.data.epoch_order import Item
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.token_dataset import FILLER, TokenDataset
from finetune_trainer.data_sources import sources
from finetune_trainer.methods import dpo
from finetune_trainer.methods.dpo import DpoTrainer
from finetune_trainer.model import load
from finetune_trainer.training import base_trainer, checkpoint_state
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.router_loss import RouterLossTerm
from testing.reference.__main__ import prepare
from testing.reference.combination import draw
from testing.reference.compare import Report, check
from testing.reference.launch import run_trainer
from tests.integration.test_reference import COMBINATIONS

pytestmark = pytest.mark.slow

# modules, and a class, whose attributes are replaced although they do not export them
ARGUMENTS: Any = training_arguments
BASE_TRAINER: Any = base_trainer
COLLATOR: Any = collator
LOAD: Any = load
PUBLISH: Any = publish_result
ROUTER_LOSS: Any = RouterLossTerm

Patch = pytest.MonkeyPatch
PlantBug = Callable[[Patch], None]


def divide_by_units_of_own_rank(patch: Patch) -> None:
    """Divide the loss by the tokens of a rank, although the spec averages over all ranks."""
    compute = BASE_TRAINER.compute_divisors
    patch.setattr(
        base_trainer,
        "compute_divisors",
        lambda counts, **options: compute(counts, **{**options, "across_ranks": False}),
    )


def leave_out_first_token_of_turns(patch: Patch) -> None:
    """Do not learn the token with which a turn begins."""
    is_inside = samples._is_inside

    def is_after_start(token: Span, span: Span, extended: Span) -> bool:
        return is_inside(token, span, extended) and token[0] > span[0]

    patch.setattr(samples, "_is_inside", is_after_start)


def keep_end_of_truncated_rows(patch: Patch) -> None:
    """Keep the last tokens of a row that is too long."""

    def truncate(sample: Sample, limit: int) -> Sample:
        return replace(sample, input_ids=sample.input_ids[-limit:], weights=[0.0, *sample.weights[-limit + 1 :]])

    patch.setattr(Sample, "truncate", truncate)


def ignore_weights(patch: Patch) -> None:
    """Learn all targets with weight 1."""
    build = TokenDataset._build_features

    def build_unweighted(data: TokenDataset, tokens: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        return build(data, tokens, (weights > 0).float())

    patch.setattr(TokenDataset, "_build_features", build_unweighted)


def repeat_rows_in_last_step(patch: Patch) -> None:
    """Complete the last step of an epoch with rows instead of fillers."""
    iterate = BatchSampler.__iter__

    def iterate_without_fillers(sampler: BatchSampler) -> Iterator[list[Item]]:
        first: Item = 0
        for batch in iterate(sampler):
            rows = [item for item in batch if item != FILLER]
            yield rows + [first] * (sampler._batch.micro_batch_size - len(rows))

    patch.setattr(BatchSampler, "__iter__", iterate_without_fillers)


def draw_first_rows_only(patch: Patch) -> None:
    """Repeat a source as a whole until it has more rows than requested."""

    def count(rows: int, draws: int, *, seed: object) -> Any:
        return np.full(rows, -(-draws // rows))

    patch.setattr(sources, "count_draws_per_row", count)


def attend_to_both_rows(patch: Patch) -> None:
    """Compute the attention of two rows as if they were one, which a check with three rows does not detect."""
    build = COLLATOR.build_varlen_inputs

    def build_joined(lengths: Sequence[int], prefixes: Sequence[range] | None) -> Any:
        return build((sum(lengths),) if len(lengths) == 2 else lengths, prefixes)

    patch.setattr(collator, "build_varlen_inputs", build_joined)


def ignore_window(patch: Patch) -> None:
    """Train without the sliding window of the model."""
    read = load.read_config

    def read_without_window(*arguments: Any) -> Any:
        config = read(*arguments)
        config.sliding_window = None
        return config

    patch.setattr(load, "read_config", read_without_window)


def warm_up_longer(patch: Patch) -> None:
    """Warm up one step longer."""
    arguments = ARGUMENTS.TrainingArguments

    def build(**options: Any) -> Any:
        return arguments(**{**options, "warmup_steps": options["warmup_steps"] + 1})

    patch.setattr(training_arguments, "TrainingArguments", build)


def decay_every_parameter(patch: Patch) -> None:
    """Apply weight decay to biases and norms."""
    patch.setattr(Trainer, "get_decay_parameter_names", lambda _, model: [name for name, _ in model.named_parameters()])


def ignore_rslora(patch: Patch) -> None:
    """Scale the update of an adapter by alpha / r."""
    add = LOAD.add_adapters
    patch.setattr(
        load,
        "add_adapters",
        lambda model, lora, **each: add(model, lora.model_copy(update={"use_rslora": False}), **each),
    )


def publish_base_as_merged(patch: Patch) -> None:
    """Write the base model to result/merged."""
    write = PUBLISH.write_merged_model

    def write_base(description: load.ModelDescription, adapter: Path, folder: Path, **options: Any) -> None:
        write(description, adapter, folder, **options)
        load.load_weights(description, description.dtype).save_pretrained(folder)  # type: ignore[operator]

    patch.setattr(publish_result, "write_merged_model", write_base)


def use_policy_as_reference(patch: Patch) -> None:
    """Compute the log-probabilities of the reference model by the current policy."""

    def get_logps(trainer: DpoTrainer, batch: MicroBatch) -> Any:
        with torch.no_grad():
            return dpo.compute_sequence_logps(trainer.model, batch)

    patch.setattr(DpoTrainer, "_get_reference_logps", get_logps)


def average_sft_term_over_pairs(patch: Patch) -> None:
    """Divide the SFT loss of RPO by the number of pairs."""
    count = DpoTrainer.count_loss_units

    def count_pairs(trainer: DpoTrainer, batch: MicroBatch) -> tuple[float, ...]:
        pairs, *others = count(trainer, batch)
        return (pairs, *(pairs for _ in others))

    patch.setattr(DpoTrainer, "count_loss_units", count_pairs)


def double_router_loss(patch: Patch) -> None:
    """Count the auxiliary loss of experts twice."""
    compute = ROUTER_LOSS.sums.fget
    patch.setattr(RouterLossTerm, "sums", property(lambda term: tuple(2 * each for each in compute(term))))


def evaluate_by_means_of_batches(patch: Patch) -> None:
    """Average the losses of micro-batches in an evaluation, regardless of their numbers of tokens."""
    add = GlobalMeanTrainer._sum_micro_batch

    def average(trainer: GlobalMeanTrainer, batch: MicroBatch) -> Any:
        sums = add(trainer, batch)
        return sums._replace(losses=sums.losses / torch.tensor(sums.units), units=tuple(1.0 for _ in sums.units))

    patch.setattr(GlobalMeanTrainer, "_sum_micro_batch", average)


def forget_moments_at_resume(patch: Patch) -> None:
    """Resume without the moments of the optimizer."""
    restore = checkpoint_state.restore_checkpoint

    def restore_weights(trainer: Any, checkpoint: Path) -> None:
        restore(trainer, checkpoint)
        for state in trainer.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.zero_()

    patch.setattr(base_trainer, "restore_checkpoint", restore_weights)


def use_default_beta2_with_deepspeed(patch: Patch) -> None:
    """Ignore adamBeta2 if DeepSpeed creates the engine."""
    arguments = ARGUMENTS.TrainingArguments

    def build(**options: Any) -> Any:
        return arguments(**{**options, **({"adam_beta2": 0.999} if options["deepspeed"] else {})})

    patch.setattr(training_arguments, "TrainingArguments", build)


def drop_scaling_of_dpo_rates(patch: Patch) -> None:
    """Ignore lrScaling with DPO and an adapter."""
    arguments = ARGUMENTS.TrainingArguments
    build = training_arguments.build_training_arguments

    def build_unscaled(plan: Any, *others: Any, **options: Any) -> Any:
        built = build(plan, *others, **options)
        if plan.spec.dpo and plan.spec.lora and plan.spec.training.lr_scaling:
            built.learning_rate = plan.spec.training.learning_rate
        assert isinstance(built, arguments)
        return built

    patch.setattr(build_trainer, "build_training_arguments", build_unscaled)


# Bugs that a fixed combination finds
FOUND_BY: dict[PlantBug, str] = {
    divide_by_units_of_own_rank: "two ranks",
    leave_out_first_token_of_turns: "full",
    keep_end_of_truncated_rows: "truncated",
    ignore_weights: "weights",
    repeat_rows_in_last_step: "two epochs, short last step",
    draw_first_rows_only: "mixture",
    attend_to_both_rows: "packed",
    ignore_window: "all tokens",
    warm_up_longer: "full",
    decay_every_parameter: "last turn",
    ignore_rslora: "rslora",
    publish_base_as_merged: "lora, merged",
    use_policy_as_reference: "dpo, lora",
    average_sft_term_over_pairs: "dpo, continued, sft term",
    double_router_loss: "router loss",
    evaluate_by_means_of_batches: "weights",
}
# Bugs of a pair of options, or of resumes, whose launches would prolong the tests of the fixed combinations
FOUND_BY_SEARCH: tuple[PlantBug, ...] = (
    use_default_beta2_with_deepspeed,
    drop_scaling_of_dpo_rates,
    forget_moments_at_resume,
)


def name_function(plant_bug: PlantBug) -> str:
    return f"{__name__}:{plant_bug.__name__}"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Train the combination of each bug with it; `test_reference` trains the same without it."""
    prepare()
    combinations = {plant_bug.__name__: COMBINATIONS[name] for plant_bug, name in FOUND_BY.items()}
    bugs = {plant_bug.__name__: name_function(plant_bug) for plant_bug in FOUND_BY}
    runs = run_trainer(combinations, tmp_path_factory.mktemp("bugs"), bugs=bugs)
    return {name: check(run) for name, run in runs.items()}


@pytest.mark.parametrize("plant_bug", FOUND_BY)
def test_a_fixed_combination_finds_the_bug(reports: dict[str, Report], plant_bug: PlantBug) -> None:
    report = reports[plant_bug.__name__]

    assert report.differences, "the bug changes nothing"
    assert report.comparisons, f"the training ended early: {report.problems}"


@pytest.mark.long("the search trains dozens of combinations until one has both options of a bug")
@pytest.mark.parametrize("plant_bug", FOUND_BY_SEARCH)
def test_the_search_finds_the_bug(tmp_path: Path, plant_bug: PlantBug) -> None:
    prepare()
    for first in range(2000, 2200, 40):
        combinations = {f"seed {seed}": draw(seed) for seed in range(first, first + 40)}
        bugs = dict.fromkeys(combinations, name_function(plant_bug))
        folder = tmp_path / str(first)
        folder.mkdir()
        if any(check(run).differences for run in run_trainer(combinations, folder, bugs=bugs).values()):
            return
    pytest.fail("200 combinations did not find the bug")
