"""Combinations of options of a training, which a seed draws."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from testing.reference.families import BIASED, EXPERTS, FAMILIES, SWITCHING, TIED, get_family

EFFECTIVE_BATCHES = (2, 4, 6, 8)


@dataclass(frozen=True)
class Layout:
    """How ranks and micro-batches divide the effective batch, and what is sharded."""

    ranks: int = 1
    micro_batch: int = 1
    accumulation: int = 4
    preset: str = "ddp"

    @property
    def effective(self) -> int:
        """Items per step over all ranks."""
        return self.ranks * self.micro_batch * self.accumulation


def option(simplest: Any, *others: Any, share: float = 0.5) -> Any:
    """Return a field with this default, which a draw replaces by one of the others in this share of cases."""
    return field(default=simplest, metadata={"others": others, "share": share})


@dataclass(frozen=True)
class Combination:
    """Options of one training; the defaults are the simplest values, to which `shrink` returns."""

    layout: Layout = field(default=Layout())
    resume: Layout | None = None  # layout from the step after `resume_after` on
    resume_after: int = option(1, 2, 3, 3)
    family: str = option("llama", *FAMILIES, share=1)
    method: str = option("sft", "dpo")
    tuner: str = option("full", "lora", "lora", "adapter", share=0.7)  # adapter: one that is trained further
    dtype: str = option("float32", "bfloat16", share=0.2)
    attention: str = option("auto", "sdpa", "eager")
    checkpointing: bool = option(False, True, share=0.2)
    # rows
    dialect: str = option("chatml", "instruct", "roles", "text", share=0.7)  # text: plain text without chat template
    rows: int = option(9, *range(5, 15), share=1)
    draws: tuple[int | None, ...] = option((None,), (None, None), (12,), (4, 3), (None, 3))  # per source: N of name#N
    weighted: bool = option(False, True, share=0.2)
    split_words: bool = option(False, True, share=0.2)  # a completion of plain text begins within a word
    loss_on: str = option("assistant", "lastTurn", "all")
    max_length: int | None = option(None, 60, 90, 150, share=0.6)
    overlong: str = option("drop", "truncate")
    packing: bool = option(False, True, share=0.4)
    evaluation: str = option("file", "split", "none")  # split: of the training rows
    # DPO
    loss_type: str = option("sigmoid", "ipo", "hinge", "robust", share=0.6)
    beta: float = option(0.1, 0.3)
    rpo_alpha: float | None = option(None, 0.5)
    precompute: bool = option(False, True, share=0.3)
    # adapter
    rank: int = option(4, 2, 16)
    alpha: int = option(8, 32)
    rslora: bool = option(False, True, share=0.3)
    dora: bool = option(False, True, share=0.3)
    targets: tuple[str, ...] = option(("all-linear",), ("q_proj", "v_proj"), ("q_proj", "lm_head"))
    saves_modules: bool = option(False, True, share=0.3)  # the adapter to continue also holds a copy of a module
    trains_biases: bool = option(False, True, share=0.6)  # the adapter to continue also holds the biases
    merge: bool = option(False, True)
    # schedule and optimizer
    steps: int = option(2, 1, 3, 4, share=0.8)
    epochs: float | None = option(None, 0.6, 1.0, share=0.3)  # instead of steps
    schedule: str = option("constant", "linear", "cosine", "constant_with_warmup", "polynomial", share=0.8)
    warmup: int = option(0, 1, 2, 4)
    scaling: str | None = option(None, "linear", "sqrt")  # rule of lrScaling
    decay: float = option(0.0, 0.1, 0.5, share=0.6)
    beta2: float = option(0.999, 0.95)
    epsilon: float = option(1e-5, 1e-4)  # with less, AdamW moves a weight by the rounding error of its gradient
    max_norm: float = option(1.0, 0.3, 0.0, share=0.6)
    mean_per_rank: bool = option(False, True, share=0.3)
    router_coefficient: float | None = option(None, 0.1)
    seed: int = 0

    @property
    def is_dpo(self) -> bool:
        """Whether the rows are preference pairs."""
        return self.method == "dpo"

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layout, and the layout after a resume if there is one."""
        return (self.layout, self.resume) if self.resume else (self.layout,)

    @property
    def learning_rate(self) -> float:
        """Rate of the spec, with which a few steps change the loss clearly."""
        return 1e-3 if self.tuner == "full" else 3e-3

    def describe_changes(self) -> dict[str, Any]:
        """Return the fields that differ from the simplest values."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


SIMPLEST = Combination()
_DPO_FIELDS = ("loss_type", "beta", "rpo_alpha", "precompute")
_SHAPE_FIELDS = ("rank", "alpha", "rslora", "dora", "targets")


def _has_defaults(combination: Combination, *names: str) -> bool:
    return all(getattr(combination, name) == getattr(SIMPLEST, name) for name in names)


def _supports(combination: Combination, feature: str) -> bool:
    return feature not in get_family(combination.family).lacks


# Rules that valid combinations keep, each with the fields that return to their simplest values if one does not
RULES: Mapping[tuple[str, ...], Callable[[Combination], bool]] = {
    ("tuner",): lambda each: each.tuner == "full" or _supports(each, "all-linear"),
    ("attention",): lambda each: _supports(each, each.attention),
    # rounding to 16 bits decides which experts compute some tokens
    ("dtype",): lambda each: each.dtype == "float32" or each.family not in EXPERTS,
    # a large scale of the update enlarges the rounding to 16 bits
    ("alpha",): lambda each: each.alpha == SIMPLEST.alpha or each.dtype == "float32",
    ("router_coefficient",): lambda each: each.router_coefficient is None or each.family in EXPERTS,
    ("packing",): lambda each: (
        not each.packing or (not each.is_dpo and each.max_length is not None and _supports(each, "packing"))
    ),
    _DPO_FIELDS: lambda each: each.is_dpo or _has_defaults(each, *_DPO_FIELDS),
    ("loss_on",): lambda each: (
        each.loss_on == "assistant" or not (each.is_dpo or (each.dialect == "text" and each.loss_on == "lastTurn"))
    ),
    # a completion of DPO is learned as a whole or not at all
    ("weighted",): lambda each: not each.weighted or (each.dialect != "text" and not each.is_dpo),
    ("split_words",): lambda each: not each.split_words or each.dialect == "text",
    _SHAPE_FIELDS: lambda each: each.tuner == "lora" or _has_defaults(each, *_SHAPE_FIELDS),
    ("targets",): lambda each: each.targets == SIMPLEST.targets or _supports(each, "q_proj"),
    # the rows of pad tokens are 0, and DoRA divides by their norm
    ("dora",): lambda each: not (each.dora and "lm_head" in each.targets and each.family in TIED),
    # a merged weight that two layers share would change both
    ("merge",): lambda each: (
        not each.merge or (each.tuner != "full" and not ("lm_head" in each.targets and each.family in TIED))
    ),
    ("saves_modules",): lambda each: each.tuner == "adapter" or not each.saves_modules,
    ("trains_biases",): lambda each: not each.trains_biases or (each.tuner == "adapter" and each.family in BIASED),
    # the reference values are computed in other micro-batches
    ("precompute",): lambda each: not each.precompute or each.family not in SWITCHING,
    ("evaluation",): lambda each: each.evaluation != "split" or set(each.draws) == {None},
    ("steps",): lambda each: each.epochs is None or _has_defaults(each, "steps"),
    ("resume",): lambda each: each.resume is None or (each.epochs is None and each.resume_after < each.steps),
    ("resume_after",): lambda each: each.resume is not None or _has_defaults(each, "resume_after"),
    ("mean_per_rank",): lambda each: not each.mean_per_rank or (each.layout.ranks > 1 and each.resume is None),
}


def is_valid(combination: Combination) -> bool:
    """Return whether the options fit each other, so that the trainer accepts them."""
    return all(is_kept(combination) for is_kept in RULES.values())


def count_values(combinations: Iterable[Combination]) -> Counter[str]:
    """Return how many combinations use each value of each option, as `option=value`."""
    counts = Counter[str]()
    for each in combinations:
        unused = {"seed", "layout", "resume", *(() if each.is_dpo else _DPO_FIELDS)}
        unused |= set() if each.tuner == "lora" else set(_SHAPE_FIELDS)
        values = {f"{option.name}={getattr(each, option.name)}" for option in fields(each) if option.name not in unused}
        for layout in each.layouts:
            values |= {f"{option.name}={getattr(layout, option.name)}" for option in fields(layout)}
        counts.update({*values, f"resume={each.resume is not None}"})
    return counts


def draw(seed: int, *, max_ranks: int = 4) -> Combination:
    """Draw a valid combination."""
    source = random.Random(seed)
    while True:
        effective = source.choice(EFFECTIVE_BATCHES)
        drawn = Combination(layout=_draw_layout(source, effective, max_ranks), seed=seed)
        if source.random() < 0.3:
            drawn = replace(drawn, resume=_draw_layout(source, effective, max_ranks))
        for each in fields(Combination):
            if each.metadata and source.random() < each.metadata["share"]:
                drawn = replace(drawn, **{each.name: source.choice(each.metadata["others"])})
        for names, is_kept in RULES.items():
            if not is_kept(drawn):
                drawn = replace(drawn, **{name: getattr(SIMPLEST, name) for name in names})
        if is_valid(drawn):
            return drawn


def _draw_layout(source: random.Random, effective: int, max_ranks: int) -> Layout:
    ranks = source.choice([ranks for ranks in range(1, max_ranks + 1) if effective % ranks == 0])
    micro_batch = source.choice([size for size in range(1, effective + 1) if effective % (ranks * size) == 0])
    preset = source.choice(("ddp", "fsdp", "zero1", "zero2", "zero3")) if ranks > 1 else "ddp"
    return Layout(ranks, micro_batch, effective // ranks // micro_batch, preset)
