"""Which implementation of attention computes: the fastest that is installed and gives what torch's own gives."""

import json
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
from finetune_trainer.distributed.collectives import device_name
from finetune_trainer.errors import InvalidSpec, first_line
from finetune_trainer.model.truncated_config import with_layers

SDPA = "sdpa"  # torch's own; it runs everywhere
_INSTALLED = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}
_FILE = "attention.json"
_CLOSE = 0.02  # of the largest number of the result: what 16 bits round away
_FASTER = 0.97  # of the time of torch's own; less is noise
_WARM, _ROUNDS = 2, 5


@dataclass(frozen=True)
class Attention:
    """The name that transformers knows it by, and why this one."""

    name: str
    why: str


@dataclass(frozen=True)
class Trial:
    """On what implementations are compared: one layer of the model, on a micro-batch of the job's length."""

    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device
    rows: int
    length: int
    packed: bool


def settle_attention(spec: TrainerSpec, trial: Trial, checkpoints: Path, *, sees: bool) -> Attention:
    """What the job says, or what is fastest. On rank 0 only. Raises InvalidSpec."""
    asked = spec.model.attn_implementation
    if asked != "auto":
        check_installed(asked)
        return Attention(asked, "as the job says")
    if sees:
        return Attention(SDPA, "models that see take no other unless the job says so")
    return choose_fastest(trial, installed(), checkpoints / _FILE)


def trial_of(
    spec: TrainerSpec, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, longest: int
) -> Trial:
    """Two rows where a micro-batch has several: packs of one row may be kept apart, and those of two not."""
    rows = 1 if spec.training.per_device_train_batch_size == 1 else 2
    return Trial(config, dtype, device, rows, longest, packed=spec.dataset.packing)


def installed() -> tuple[str, ...]:
    """Beside torch's own, which need a GPU."""
    return tuple(name for name, there in _INSTALLED.items() if torch.cuda.is_available() and there())


def check_installed(name: str) -> None:
    """Raises InvalidSpec for an implementation that this image or machine lacks."""
    if name in _INSTALLED and name not in installed():
        there = ", ".join((SDPA, "eager", *installed()))
        raise InvalidSpec(
            f"spec.model.attnImplementation: {name} is not installed in this image, or there is no GPU for it; take one"
            f" of {there}, or auto"
        )


def choose_fastest(trial: Trial, candidates: Iterable[str], kept: Path) -> Attention:
    """By measurement. What an attempt before chose from the same stays: results differ in what is rounded."""
    names = tuple(candidates)
    if not names:
        return Attention(SDPA, "the only one here")
    circumstances = {"device": device_name(trial.device), "candidates": list(names)}
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["circumstances"] == circumstances:
            return Attention(found["name"], "as in an attempt before")
    chosen = measure(trial, names)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_json(kept, {"name": chosen.name, "why": chosen.why, "circumstances": circumstances})
    return chosen


def measure(trial: Trial, candidates: Iterable[str]) -> Attention:
    """Forward and backward of one layer with each; one that fails or computes something else is out."""
    with _left_as_it_was(trial.device):
        try:
            layer = _one_layer(trial)
            expected, own = _run(layer, SDPA, trial)
        except Exception as error:  # the model itself may work; if not, it says why
            return Attention(SDPA, f"a layer alone cannot be tried: {first_line(error)}")
        seconds, told = {SDPA: own}, [f"{SDPA} {1000 * own:.2f}"]
        for name in candidates:
            took = _compare(layer, name, trial, expected)
            told.append(f"{name} {took if isinstance(took, str) else f'{1000 * took:.2f}'}")
            if isinstance(took, float) and took < _FASTER * own:
                seconds[name] = took
    fastest = min(seconds, key=lambda name: seconds[name])
    shape = f"{trial.rows} x {trial.length} tokens{' in packs' if trial.packed else ''}"
    return Attention(fastest, f"ms for a layer forward and backward, {shape}: {', '.join(told)}")


def _compare(layer: torch.nn.Module, name: str, trial: Trial, expected: torch.Tensor) -> float | str:
    """Its seconds, or why it cannot be taken."""
    try:
        result, took = _run(layer, name, trial)
    except Exception as error:  # whatever a library throws means that it cannot be taken
        return f"fails: {first_line(error)}"
    return "computes something else" if _differ(result, expected) else took


def _one_layer(trial: Trial) -> torch.nn.Module:
    config = with_layers(trial.config.get_text_config(), 1)
    with trial.device:
        layer: torch.nn.Module = AutoModel.from_config(config, dtype=trial.dtype, attn_implementation=SDPA)
    return layer.train()


def _run(layer: torch.nn.Module, name: str, trial: Trial) -> tuple[torch.Tensor, float]:
    """The result, and the median of some rounds in seconds."""
    layer.set_attn_implementation(name)  # type: ignore[operator]
    ids = torch.arange(trial.rows * trial.length, device=trial.device).view(trial.rows, trial.length)
    ids = ids % trial.config.get_text_config().vocab_size
    positions = torch.arange(trial.length, device=trial.device)
    if trial.packed:
        positions = positions % max(trial.length // 4, 1)  # four documents
    inputs = {"input_ids": ids, "position_ids": positions.expand(trial.rows, -1), "use_cache": False}
    spent = []
    for _ in range(_WARM + _ROUNDS):
        layer.zero_grad(set_to_none=True)
        began = _now(trial.device)
        result: torch.Tensor = layer(**inputs).last_hidden_state
        result.float().sum().backward()  # type: ignore[no-untyped-call]
        spent.append(_now(trial.device) - began)
    return result.detach(), statistics.median(spent[_WARM:])


def _differ(result: torch.Tensor, expected: torch.Tensor) -> bool:
    apart = (result.float() - expected.float()).abs().max() / expected.float().abs().max()
    return not bool(apart <= _CLOSE)  # of NaN neither is true


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _left_as_it_was(device: torch.device) -> Iterator[None]:
    """Random numbers, and memory of the GPU."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        yield
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
