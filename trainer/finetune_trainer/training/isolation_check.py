"""Check that each sequence of a micro-batch has the logits that it would have alone (decisions/538).

Other sequences in its row, padding, and the position ids, lengths and masks of the collator must not change them.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.token_dataset import IGNORE_INDEX, MROPE_POSITION_IDS, POSITION_IDS, Features
from finetune_trainer.model.load import max_length
from finetune_trainer.training.token_losses import compute_logits

# Tolerances in rounding steps of the norm of the logits. Kernels may round differently if other sequences change; other
# kernels always do, and may then choose other experts.
_SAME_KERNEL_STEPS, _OTHER_KERNEL_STEPS = 4, 16
_MIN_ROUNDING_STEP = 2.5e-4
_LEAK_SHARE = 1 / 8  # of the effect that an earlier part of a sequence has on a later one
_PARTS = 3
_MAX_PART_LENGTH = 256  # tokens; more than the 128 of a block that DeepSeek-V4 compresses
_MAX_LOGITS_BYTES = 2**30  # of a forward pass, in float32


@dataclass(frozen=True)
class IsolationProbe:
    """Token ids of the sequences of a check, and their arrangement in micro-batches."""

    parts: torch.Tensor  # token ids of two versions of each part of a row, (2, parts, tokens)
    layout: SequenceLayout
    rows: int
    packed: bool  # whether the parts of a row are sequences; otherwise a row is one sequence
    use_mrope: bool = False  # whether to add position ids for M-RoPE to packs
    pad_id: int = 0
    dtype: torch.dtype = torch.float32  # in which the model computes


class Passes(NamedTuple):
    """Forward passes of a model in evaluation mode without gradients."""

    run: Callable[[MicroBatch], list[torch.Tensor]]  # returns the logits before each target by sequence
    run_alone: Callable[[torch.Tensor], torch.Tensor]  # token ids (batch, seq) to logits (batch, seq - 1, vocab)


def draw_parts(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, *, rows: int) -> torch.Tensor:
    """Draw the token ids of an IsolationProbe, which are neither special tokens nor placeholders of images.

    A row fits into the context of the model, and the logits of a micro-batch need at most 1 GiB.
    """
    text_config = config.get_text_config()
    fields, vocabulary_size = {**vars(config), **vars(text_config)}, int(text_config.vocab_size)
    named = (value for name, value in fields.items() if name.endswith(("_token_id", "_token_index")))
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    special |= {number for value in named for number in (value if isinstance(value, list) else [value])}
    ids = torch.tensor([number for number in range(min(len(tokenizer), vocabulary_size)) if number not in special])
    row_lengths = (max_length(config) or _PARTS * _MAX_PART_LENGTH, _MAX_LOGITS_BYTES // (4 * vocabulary_size * rows))
    length = max(2, min(_MAX_PART_LENGTH, min(row_lengths) // _PARTS))
    return ids[torch.randint(len(ids), (2, _PARTS, length), generator=torch.Generator().manual_seed(0))]


def find_fault(
    model: torch.nn.Module,
    probe: IsolationProbe,
    device: torch.device,
    run_plainly: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> str | None:
    """Return what changes the logits of sequences in a micro-batch; None if nothing does (collective).

    run_plainly: returns a context in which the model needs no lengths of sequences.
    """

    def run(batch: MicroBatch) -> list[torch.Tensor]:
        logits = compute_logits(model, batch.to(device)).flatten(0, 1)
        sequences = range(len(batch.lengths))
        return [logits[batch.targets.positions[batch.targets.sequences == number].to(device)] for number in sequences]

    def run_alone(ids: torch.Tensor) -> torch.Tensor:
        with run_plainly():
            logits: torch.Tensor = model(input_ids=ids.to(device), use_cache=False).logits
        return logits[:, :-1]

    was_training, passes = model.training, Passes(run, run_alone)
    model.eval()
    with torch.no_grad():
        faults = _find_pack_faults(probe, passes) if probe.packed else _find_row_faults(probe, passes)
        if probe.layout.shares_prompts:
            faults["a completion does not attend to a prompt that it shares"] = not _computes_shared_prompts(probe, run)
    model.train(was_training)
    return next((fault for fault, exists in faults.items() if exists), None)


def _find_pack_faults(probe: IsolationProbe, passes: Passes) -> dict[str, bool]:
    """Return which faults rows of several sequences have; the second row, if any, is shorter."""
    rows, outputs = [range(_PARTS), range(_PARTS - 1)][: probe.rows], []
    for changed in range(_PARTS):
        parts = probe.parts[0].clone()
        parts[changed] = probe.parts[1, changed]
        outputs.append(passes.run(_collate(probe, [tuple(parts[list(row)]) for row in rows])))
    alone, leak = passes.run_alone(probe.parts[0]), _measure_leak(probe, passes)
    parts_of_sequences = [part for row in rows for part in row]
    pairs = [  # the logits of a sequence in the two passes that do not change it
        (outputs[(part + 1) % _PARTS][sequence], outputs[(part + 2) % _PARTS][sequence])
        for sequence, part in enumerate(parts_of_sequences)
    ]
    return {
        "a sequence changes the logits of another one in its row": not all(
            _are_equal(*pair, probe.dtype, _SAME_KERNEL_STEPS, limit=_LEAK_SHARE * leak) for pair in pairs
        ),
        "a sequence has other logits than alone, because of its position ids or padding": not all(
            _are_equal(pair[0], alone[part], probe.dtype, _OTHER_KERNEL_STEPS)
            for pair, part in zip(pairs, parts_of_sequences, strict=True)
        ),
    }


def _measure_leak(probe: IsolationProbe, passes: Passes) -> float:
    """Return how much a model without isolation would change the logits of a sequence, relative to their norm.

    It is small before a model has learned to attend to other tokens, and then below the tolerance for rounding.
    """
    length = probe.parts.shape[2]
    joined = torch.stack([torch.cat((first, probe.parts[0, 1])) for first in probe.parts[:, 0]])
    return _compute_distance(*passes.run_alone(joined)[:, length:])


def _find_row_faults(probe: IsolationProbe, passes: Passes) -> dict[str, bool]:
    """Return which faults rows of one sequence have; the second row, if any, is the first half of the first one."""
    half = probe.parts.shape[2]
    sequences = [probe.parts[0, :2].flatten(), probe.parts[0, 0]]
    outputs = passes.run(_collate(probe, [(sequence,) for sequence in sequences[: probe.rows]]))
    alone = [passes.run_alone(sequence.unsqueeze(0))[0] for sequence in sequences]
    return {
        "a token attends to later ones": not probe.layout.masks_padding
        and not _are_equal(alone[0][: half - 1], alone[1], probe.dtype, _OTHER_KERNEL_STEPS),
        "a row has other logits than alone, because of padding": not all(
            _are_equal(output, expected, probe.dtype, _OTHER_KERNEL_STEPS)
            for output, expected in zip(outputs, alone, strict=False)
        ),
    }


def _computes_shared_prompts(probe: IsolationProbe, run: Callable[[MicroBatch], list[torch.Tensor]]) -> bool:
    """Return whether a pair that contains its prompt once has the logits of two whole sequences."""
    prompt, *completions = probe.parts[0]
    pair = tuple(_build_sequence(probe, (torch.cat((prompt, completion)),)) for completion in completions)
    for sequence in pair:
        sequence["labels"][: len(prompt)] = IGNORE_INDEX
    layouts = (replace(probe.layout, shares_prompts=shares) for shares in (True, False))
    shared, whole = (run(Collator(probe.pad_id, layout)([pair])) for layout in layouts)
    return all(_are_equal(*logits, probe.dtype, _OTHER_KERNEL_STEPS) for logits in zip(shared, whole, strict=True))


def _collate(probe: IsolationProbe, rows: Sequence[tuple[torch.Tensor, ...]]) -> MicroBatch:
    """Return the micro-batch of rows, each of which consists of the token ids of its parts."""
    collate = Collator(probe.pad_id, replace(probe.layout, shares_prompts=False))
    return collate([(_build_sequence(probe, row),) for row in rows])


def _build_sequence(probe: IsolationProbe, parts: tuple[torch.Tensor, ...]) -> Features:
    ids = torch.cat(parts)
    labels = torch.cat([part.index_fill(0, torch.tensor([0]), IGNORE_INDEX) for part in parts])
    sequence = {"input_ids": ids, "labels": labels}
    if probe.packed:
        sequence[POSITION_IDS] = torch.cat([torch.arange(len(part)) for part in parts])
        if probe.use_mrope:
            sequence[MROPE_POSITION_IDS] = sequence[POSITION_IDS].unsqueeze(1).expand(-1, 3)
    return sequence


def _are_equal(
    logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, steps: int, *, limit: float = math.inf
) -> bool:
    """Return whether logits are equal but for rounding; also True if they are NaN, which the loss reports.

    limit: a smaller tolerance, as far as the dtype permits it.
    """
    step = torch.finfo(dtype).eps
    tolerance = min(steps * max(step, _MIN_ROUNDING_STEP), max(limit, _OTHER_KERNEL_STEPS * step))
    return not _compute_distance(logits, expected) > tolerance


def _compute_distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference of logits relative to that of the expected ones.

    The mean of the logits of a token is ignored, because it changes no probability.
    """
    difference, reference = logits.float() - expected.float(), expected.float()
    norms = [(values - values.mean(dim=-1, keepdim=True)).norm() for values in (difference, reference)]
    return float(norms[0] / norms[1])
