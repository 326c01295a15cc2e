"""Converters of option values to fields of the job, which several tools share."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from finetune_convert.mapping.rules import Options, Unconvertible

T = TypeVar("T")

MAX_DDP_TIMEOUT = 604_800


def bounded_int(low: int, high: int | None = None) -> Callable[[Any], int]:
    """Return a converter of integers that the field accepts."""

    def convert(value: Any) -> int:
        number = to_float(value)
        if number != int(number) or number < low or (high is not None and number > high):
            raise Unconvertible(
                f"{value} is out of range: the field is an integer from {low} to {high or 'unlimited'}",
                needs_program=False,
            )
        return int(number)

    return convert


def bounded_float(low: float, high: float, *, open_low: bool = False) -> Callable[[Any], float]:
    """Return a converter of numbers that the field accepts."""

    def convert(value: Any) -> float:
        number = to_float(value)
        if not low <= number <= high or (open_low and number == low):
            raise Unconvertible(
                f"{value} is out of range: the field is a number from {low:g} to {high:g}", needs_program=False
            )
        return number

    return convert


def to_float(value: Any) -> float:
    """Return the value as a number."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise Unconvertible(f"{value} is not a number", needs_program=False) from None


def to_beta(value: Any) -> float | None:
    """Return a decay rate of Adam, or None if the option has no value."""
    return None if value is None else bounded_float(0, 0.9999999)(value)


def to_epsilon(value: Any) -> float | None:
    """Return the epsilon of Adam, or None if the option has no value."""
    return None if value is None else bounded_float(0, 1, open_low=True)(value)


def read_value(options: Options, convert: Callable[[Any], T], *names: str, default: Any = 0) -> T:
    """Return the converted value of the first name in the input, otherwise the tool's default, otherwise `default`.

    Raises: Unconvertible with the name of the option
    """
    try:
        return convert(options.get_first(*names) or default)
    except Unconvertible as error:
        name = next((name for name in names if name in options.given), names[-1])
        raise Unconvertible(f"{name}: {error}", needs_program=error.needs_program) from None


def read_number(options: Options, *names: str, default: float = 0) -> float:
    """Return the number of the first name in the input, otherwise the tool's default, otherwise `default`."""
    return read_value(options, to_float, *names, default=default)


def to_bool(value: Any) -> bool:
    """Return the value as a bool; words such as auto are errors."""
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "yes", "1"):
        return True
    if value is None or str(value).lower() in ("false", "no", "0"):
        return False
    raise Unconvertible(f"{value} is neither true nor false", needs_program=False)


def off_if_zero(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a converter that leaves the field out for None, 0 and false."""
    return lambda value: None if value in (None, 0, False, "") else convert(value)


def choice(mapping: dict[Any, Any], reason: str, *, needs_program: bool = True) -> Callable[[Any], Any]:
    """Return a converter that maps known values."""

    def convert(value: Any) -> Any:
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, list | dict) or key not in mapping:
            raise Unconvertible(f"{value}: {reason}", needs_program=needs_program)
        return mapping[key]

    return convert


to_dtype = choice(
    {
        **dict.fromkeys((None, "auto"), None),
        **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
        **dict.fromkeys(("float16", "fp16"), "float16"),
        **dict.fromkeys(("float32", "fp32"), "float32"),
    },
    "this trainer has bfloat16, float16 and float32",
)
to_attention = choice(
    {
        **dict.fromkeys((None, "auto"), None),
        **dict.fromkeys(("flash_attn", "flash_attention_2", "fa2"), "flash_attention_2"),
        "flash_attention_3": "flash_attention_3",
        "sdpa": "sdpa",
        "eager": "eager",
        "disabled": "eager",
    },
    "this trainer has no such attention; the fastest one that is installed is used",
    needs_program=False,
)
to_scheduler = choice(
    {name: name for name in ("linear", "cosine", "constant", "constant_with_warmup", "polynomial")},
    "this trainer has the schedules linear, cosine, constant, constant_with_warmup and polynomial",
)
to_optimizer = choice(
    {
        **dict.fromkeys((None, "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw_torch_fused"),
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
        "paged_adamw_32bit": "adamw_torch_fused",
    },
    "this trainer has AdamW with moments in float32 and in 8 bits",
)
_REPORTERS: dict[Any, str | None] = {
    "all": None,
    None: "none",
    "none": "none",
    **{name: name for name in ("tensorboard", "wandb", "mlflow", "swanlab")},
}


def to_reporters(value: Any) -> list[str] | None:
    """Return the reporters of report_to."""
    names = [name if name is None else str(name) for name in as_list(value)] or [None]
    unknown = [name for name in names if name not in _REPORTERS]
    if unknown:
        raise Unconvertible(
            f"{unknown[0]}: this trainer reports to tensorboard, wandb, mlflow and swanlab", needs_program=False
        )
    known = [reporter for name in dict.fromkeys(names) if (reporter := _REPORTERS[name])]
    return ["none"] if "none" in known else known or None


def to_target_modules(value: Any) -> list[str]:
    """Return the module names of LoRA; words such as ALL mean all linear layers."""
    names = value if isinstance(value, list) else [part.strip() for part in str(value).split(",")]
    names = [str(name) for name in names if name]
    if any(name.lower() in ("all-linear", "all", "all_linear") for name in names):
        return ["all-linear"]
    special = [name for name in names if name.isupper()]
    if special or not names:
        raise Unconvertible(f"{' '.join(special)}: this trainer takes all-linear or the names of modules")
    if len(names) > 64:
        raise Unconvertible("at most 64 names of modules are possible")
    return names


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, nothing as an empty list, and another value as a list of it."""
    return value if isinstance(value, list) else [] if value in (None, "", False) else [value]


def to_length(value: Any) -> int:
    """Return a length in tokens."""
    return bounded_int(1, 10_000_000)(value)


def to_whole_alpha(value: Any) -> int:
    """Return lora_alpha as an integer."""
    number = to_float(value)
    if number != int(number) or not 1 <= number <= 65536:
        raise Unconvertible(f"{value}: loraAlpha is an integer from 1 to 65536")
    return int(number)


def to_timeout(value: Any) -> int:
    """Return a timeout of collectives, at most one week."""
    return min(max(int(to_float(value)), 10), MAX_DDP_TIMEOUT)


def to_deepspeed_preset(value: Any) -> str | None:
    """Return the preset that the name of a DeepSpeed config means, such as ds_z3_offload_config.json.

    Raises: Unconvertible if the name contains no stage
    """
    if value in (None, "", False):
        return None
    if isinstance(value, dict):
        raise Unconvertible("it is a config, not a name")
    text = str(value).lower()
    match = re.search(r"(?:zero|z|stage)[-_ ]?([0-3])", text)
    if match is None:
        raise Unconvertible(f"the config {value} is not part of the input")
    offload = "_offload" if "offload" in text else ""
    return {"0": None, "1": "zero1", "2": f"zero2{offload}", "3": f"zero3{offload}"}[match[1]]
