"""Learning rates by their formulas, and the numbers of steps and epochs."""

import math
from collections.abc import Callable, Mapping

from testing.reference.combination import Combination

LAST_RATE = 1e-7  # to which the polynomial schedule of transformers decays
BASE_BATCH = 2  # of lrScaling


def compute_peak_rate(options: Combination) -> float:
    """Return the rate of the spec, scaled to the effective batch if the spec requests it."""
    ratio = options.layout.effective / BASE_BATCH
    return options.learning_rate * {None: 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[options.scaling]


def compute_rate(options: Combination, *, step: int, total_steps: int) -> float:
    """Return the rate of a step, which is numbered from 1: linear warm-up from 0, then the decay."""
    peak, done = compute_peak_rate(options), step - 1
    if options.schedule == "constant":  # without warm-up in transformers
        return peak
    if done < options.warmup:
        return peak * done / options.warmup
    share = (done - options.warmup) / max(1, total_steps - options.warmup)
    return DECAYS[options.schedule](peak, share)


DECAYS: Mapping[str, Callable[[float, float], float]] = {
    "constant_with_warmup": lambda peak, _: peak,
    "linear": lambda peak, share: peak * (1 - share),
    "cosine": lambda peak, share: peak * (1 + math.cos(math.pi * share)) / 2,
    "polynomial": lambda peak, share: LAST_RATE + (peak - LAST_RATE) * (1 - share),
}


def count_steps_per_epoch(options: Combination, items: int) -> int:
    """Return the number of steps in which each item is used once; the last one may have fewer items."""
    return math.ceil(items / options.layout.effective)


def count_steps(options: Combination, items: int) -> int:
    """Return the number of steps of the training."""
    if options.epochs is None:
        return options.steps
    return math.ceil(options.epochs * count_steps_per_epoch(options, items))


def compute_epoch(options: Combination, *, step: int, items: int) -> float:
    """Return the fraction of epochs after a step, as the share of the rounds of one micro-batch per rank."""
    layout = options.layout if options.resume is None or step <= options.resume_after else options.resume
    whole, steps = divmod(step, count_steps_per_epoch(options, items))
    return whole + steps * layout.accumulation / math.ceil(items / (layout.micro_batch * layout.ranks))
