"""Check that the model isolates sequences in one row from each other, and that its attention is causal."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.token_dataset import IGNORE_INDEX, MROPE_POSITION_IDS, POSITION_IDS, Features
from finetune_trainer.training.token_losses import compute_logits

_MIN_TOLERANCE, _MAX_ROUNDING_STEPS = 1e-3, 4  # relative to the largest logit; real influence changes logits much more
_LENGTH = 4  # tokens of each part of a row


@dataclass(frozen=True)
class IsolationProbe:
    """Two micro-batches whose rows have equal parts, except for the second one."""

    first: MicroBatch
    second: MicroBatch
    rows: int
    parts: int  # per row


def build_probe(layout: SequenceLayout, *, rows: int, packed: bool, use_mrope: bool) -> IsolationProbe:
    """Build the micro-batches of a check.

    Use the layout of training and its micro-batch size, at most two, because some attention kernels detect the
    boundaries of sequences from the position ids only at batch size 1. packed: whether the parts are sequences;
    otherwise a row is one sequence. use_mrope: whether to add position ids for M-RoPE.
    """
    collate = Collator(0, replace(layout, shares_prompts=False))
    starts = ((0, 4, 8), (0, 12, 8)) if packed else ((0, 4), (0, 12))  # first token id of each part
    first, second = (collate([(_build_row(ids, packed=packed, use_mrope=use_mrope),)] * rows) for ids in starts)
    return IsolationProbe(first, second, rows, len(starts[0]))


def _build_row(starts: tuple[int, ...], *, packed: bool, use_mrope: bool) -> Features:
    ids = torch.cat([torch.arange(start, start + _LENGTH) for start in starts])
    row = {"input_ids": ids, "labels": ids}
    if packed or use_mrope:
        row[POSITION_IDS] = torch.arange(len(ids)) % (_LENGTH if packed else len(ids))
    if use_mrope:
        row[MROPE_POSITION_IDS] = row[POSITION_IDS].unsqueeze(1).expand(-1, 3)
    return row


def is_isolated(model: torch.nn.Module, probe: IsolationProbe, device: torch.device) -> bool:
    """Return whether the second part of a row leaves the logits of the other parts unchanged (collective)."""
    logits = _evaluate(model, (probe.first, probe.second), device)
    return _are_equal(*(_select_unchanged_parts(values, probe) for values in logits))


def computes_shared_prompts(model: torch.nn.Module, device: torch.device, *, use_mrope: bool) -> bool:
    """Return whether a pair that contains its prompt once has the logits of two whole sequences (collective).

    use_mrope: whether to add position ids for M-RoPE.
    """
    pair = tuple(_build_row((0, start), packed=False, use_mrope=use_mrope) for start in (_LENGTH, 2 * _LENGTH))
    for sequence in pair:
        sequence["labels"] = sequence["labels"].clone()
        sequence["labels"][:_LENGTH] = IGNORE_INDEX
    layouts = (SequenceLayout(padding_free=True, shares_prompts=shares) for shares in (True, False))
    batches = tuple(Collator(0, layout)([pair]) for layout in layouts)
    logits = _evaluate(model, batches, device)
    return _are_equal(*(_select_targets(*pair) for pair in zip(logits, batches, strict=True)))


@torch.no_grad()
def _evaluate(model: torch.nn.Module, batches: Sequence[MicroBatch], device: torch.device) -> list[torch.Tensor]:
    """Return the logits of micro-batches without dropout."""
    was_training = model.training
    model.eval()
    logits = [compute_logits(model, batch.to(device)) for batch in batches]
    model.train(was_training)
    return logits


def _are_equal(logits: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether logits are equal but for rounding; also True if they are NaN, which the loss reports."""
    tolerance = max(_MIN_TOLERANCE, _MAX_ROUNDING_STEPS * torch.finfo(logits.dtype).eps)
    return not bool((logits - other).abs().max() > tolerance * logits.abs().max())


def _select_targets(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the logits of the target tokens by sequence, (targets, vocab)."""
    order = torch.argsort(batch.targets.sequences, stable=True)
    return logits.flatten(0, 1)[batch.targets.positions[order]]


def _select_unchanged_parts(logits: torch.Tensor, probe: IsolationProbe) -> torch.Tensor:
    """Return the logits without padding and without the second part of each row, (rows, parts - 1, tokens, vocab)."""
    by_row = logits.reshape(probe.rows, -1, logits.shape[-1])[:, : probe.parts * _LENGTH]
    by_part = by_row.reshape(probe.rows, probe.parts, _LENGTH, -1)
    return torch.cat((by_part[:, :1], by_part[:, 2:]), dim=1)
