"""Tests that drawn combinations are valid and reproducible, and that a difference is shrunk to its causes."""

from dataclasses import replace
from pathlib import Path

import yaml

from finetune_api.v1alpha1.job import TrainerSpec
from testing.reference.combination import SIMPLEST, Combination, Layout, count_values, draw, is_valid
from testing.reference.shrink import format_job, shrink


def test_a_seed_always_draws_the_same_valid_combination() -> None:
    combinations = [draw(seed) for seed in range(200)]

    assert all(is_valid(each) for each in combinations)
    assert combinations == [draw(seed) for seed in range(200)]
    assert len({replace(each, seed=0) for each in combinations}) == 200
    assert min(count_values(combinations).values()) >= 2


def test_a_difference_is_shrunk_to_the_options_that_cause_it() -> None:
    drawn = next(each for each in map(draw, range(1000)) if each.weighted and each.decay and each.layout.ranks == 2)

    smallest = shrink(drawn, lambda each: [one for one in each if one.weighted and one.decay])

    assert smallest == Combination(weighted=True, decay=drawn.decay, seed=drawn.seed, steps=1)


def test_a_shrunk_combination_keeps_ranks_that_it_needs() -> None:
    drawn = Combination(layout=Layout(2, 2, 1, "zero2"), steps=4, schedule="linear", packing=True, max_length=90)

    smallest = shrink(drawn, lambda each: [one for one in each if one.layout.preset == "zero2"])

    assert smallest == replace(SIMPLEST, layout=Layout(2, 2, 1, "zero2"), steps=1)


def test_one_of_two_causes_is_kept() -> None:
    drawn = Combination(decay=0.5, dialect="text", steps=3)

    smallest = shrink(drawn, lambda each: [one for one in each if one.decay or one.dialect == "text"])

    assert smallest == Combination(decay=0.5, steps=1)


def test_the_printed_job_is_valid(tmp_path: Path) -> None:
    for seed in range(6):
        job = yaml.safe_load(format_job(draw(seed), tmp_path))
        assert Path(job["spec"]["dataset"]["train"][0]["name"].partition("#")[0]).is_file()
        assert TrainerSpec.model_validate(job["spec"]).training.seed == seed
