"""Chooses the fastest installed attention implementation that computes the same output as torch's SDPA."""

import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel, PretrainedConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.atomic_files import write_json
from finetune_trainer.distributed.devices import get_device_name
from finetune_trainer.errors import InvalidSpec, first_line
from finetune_trainer.model.truncated_config import truncate_layers

SDPA = "sdpa"  # included in torch and supported on every device
_INSTALLED = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}
_FILE = "attention.json"
_RELATIVE_TOLERANCE = 0.02  # 16-bit rounding error, relative to the largest output element
_MAX_RELATIVE_TIME = 0.97  # a candidate must be 3 % faster than SDPA; smaller differences are noise
_WARMUP_ROUNDS, _ROUNDS = 2, 5


@dataclass(frozen=True)
class AttentionChoice:
    """Chosen attention implementation and the reason for the choice, which is logged."""

    name: str  # value of attn_implementation in transformers
    reason: str


@dataclass(frozen=True)
class AttentionTrial:
    """Settings of an attention benchmark, which runs one layer of the model on one micro-batch."""

    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device
    row_count: int
    tokens_per_row: int
    is_packed: bool


def select_attention(
    spec: TrainerSpec, trial: AttentionTrial, checkpoint_folder: Path, *, is_multimodal: bool
) -> AttentionChoice:
    """Return the attention implementation in the spec, or the fastest one for `auto`.

    Called on rank 0 only. Raises: InvalidSpec.
    """
    requested = spec.model.attn_implementation
    if requested != "auto":
        check_backend_installed(requested)
        return AttentionChoice(requested, "set in spec.model.attnImplementation")
    if is_multimodal:
        return AttentionChoice(SDPA, "the default for vision-language models")
    return choose_fastest_backend(trial, find_installed_backends(), checkpoint_folder / _FILE)


def build_attention_trial(
    spec: TrainerSpec, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, tokens_per_row: int
) -> AttentionTrial:
    """Return the settings of the attention benchmark for a job.

    The benchmark uses two rows, or one if the micro-batch size is 1, as FlashAttention requires for packed rows.
    tokens_per_row: number of tokens in the longest row, or in a pack.
    """
    row_count = 1 if spec.training.per_device_train_batch_size == 1 else 2
    return AttentionTrial(config, dtype, device, row_count, tokens_per_row, is_packed=spec.dataset.packing)


def find_installed_backends() -> tuple[str, ...]:
    """Return the installed implementations except SDPA; all of them require a GPU."""
    return tuple(name for name, is_installed in _INSTALLED.items() if torch.cuda.is_available() and is_installed())


def check_backend_installed(name: str) -> None:
    """Raise InvalidSpec if this image lacks the implementation or there is no GPU for it."""
    if name in _INSTALLED and name not in find_installed_backends():
        available = ", ".join((SDPA, "eager", *find_installed_backends()))
        raise InvalidSpec(
            f"spec.model.attnImplementation: {name} is not installed in this image, or there is no GPU for it; use one"
            f" of {available}, or auto"
        )


def choose_fastest_backend(trial: AttentionTrial, candidates: Iterable[str], cache_file: Path) -> AttentionChoice:
    """Benchmark the candidates, or reuse the choice of an earlier attempt with the same GPU and candidates.

    All attempts use the same implementation, because implementations differ in rounding.
    """
    names = tuple(candidates)
    if not names:
        return AttentionChoice(SDPA, "no other is installed")
    cache_key = {"device": get_device_name(trial.device), "candidates": list(names)}
    with suppress(OSError, ValueError, KeyError, TypeError):
        cached = json.loads(cache_file.read_text(encoding="utf-8"))
        if cached["circumstances"] == cache_key:
            return AttentionChoice(cached["name"], "chosen by an earlier attempt")
    choice = benchmark_backends(trial, names)
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(cache_file, {"name": choice.name, "why": choice.reason, "circumstances": cache_key})
    return choice


def benchmark_backends(trial: AttentionTrial, candidates: Iterable[str]) -> AttentionChoice:
    """Measure the time of one layer with each candidate, and choose the fastest correct one (decisions/703).

    Candidates that fail or whose output differs from the output of SDPA are rejected.
    """
    with _restore_rng_and_memory(trial.device):
        try:
            layer = _build_layer(trial)
            expected_output, sdpa_seconds = _time_layer(layer, SDPA, trial)
        except Exception as error:  # not fatal, because the full model may still work
            return AttentionChoice(SDPA, f"a single layer cannot be benchmarked: {first_line(error)}")
        seconds, results = {SDPA: sdpa_seconds}, [f"{SDPA} {1000 * sdpa_seconds:.2f}"]
        for name in candidates:
            outcome = _try_backend(layer, name, trial, expected_output)
            results.append(f"{name} {outcome if isinstance(outcome, str) else f'{1000 * outcome:.2f}'}")
            if isinstance(outcome, float) and outcome < _MAX_RELATIVE_TIME * sdpa_seconds:
                seconds[name] = outcome
    fastest = min(seconds, key=lambda name: seconds[name])
    shape = f"{trial.row_count} x {trial.tokens_per_row} tokens{', packed' if trial.is_packed else ''}"
    return AttentionChoice(fastest, f"ms per layer, forward and backward, {shape}: {', '.join(results)}")


def _try_backend(
    layer: torch.nn.Module, name: str, trial: AttentionTrial, expected_output: torch.Tensor
) -> float | str:
    """Return the median time in seconds, or the reason for rejecting the implementation."""
    try:
        output, seconds = _time_layer(layer, name, trial)
    except Exception as error:  # the kernel libraries raise exceptions of many types
        return f"fails: {first_line(error)}"
    return "wrong output" if _is_outside_tolerance(output, expected_output) else seconds


def _build_layer(trial: AttentionTrial) -> torch.nn.Module:
    config = truncate_layers(trial.config.get_text_config(), 1)
    with trial.device:
        layer: torch.nn.Module = AutoModel.from_config(config, dtype=trial.dtype, attn_implementation=SDPA)
    return layer.train()


def _time_layer(layer: torch.nn.Module, name: str, trial: AttentionTrial) -> tuple[torch.Tensor, float]:
    """Return the output, (batch, seq, hidden), and the median time of a forward and backward pass in seconds."""
    layer.set_attn_implementation(name)  # type: ignore[operator]
    shape = (trial.row_count, trial.tokens_per_row)
    ids = torch.arange(math.prod(shape), device=trial.device).view(shape)
    ids = ids % trial.config.get_text_config().vocab_size
    positions = torch.arange(trial.tokens_per_row, device=trial.device)
    if trial.is_packed:
        positions = positions % max(trial.tokens_per_row // 4, 1)  # simulate packs of four rows
    inputs = {"input_ids": ids, "position_ids": positions.expand(trial.row_count, -1), "use_cache": False}
    durations = []
    for _ in range(_WARMUP_ROUNDS + _ROUNDS):
        layer.zero_grad(set_to_none=True)
        started = _read_clock(trial.device)
        output: torch.Tensor = layer(**inputs).last_hidden_state
        output.float().sum().backward()  # type: ignore[no-untyped-call]
        durations.append(_read_clock(trial.device) - started)
    return output.detach(), statistics.median(durations[_WARMUP_ROUNDS:])


def _is_outside_tolerance(output: torch.Tensor, expected_output: torch.Tensor) -> bool:
    difference = (output.float() - expected_output.float()).abs().max() / expected_output.float().abs().max()
    return not bool(difference <= _RELATIVE_TOLERANCE)  # also True if the difference is NaN


def _read_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _restore_rng_and_memory(device: torch.device) -> Iterator[None]:
    """Restore the random state, free the GPU memory and reset its peak statistics."""

    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        yield
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
