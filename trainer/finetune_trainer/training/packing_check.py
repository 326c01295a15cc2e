"""Check that a model isolates the rows of a pack from each other."""

import torch

from finetune_trainer.data.packing import MROPE_POSITION_IDS, POSITION_IDS
from finetune_trainer.data.token_dataset import Features
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.training.token_losses import compute_logits

_TOLERANCE = 1e-3  # relative to the largest logit; attention across rows causes much larger changes


def build_probe_packs(pack_count: int, device: torch.device, *, use_mrope: bool) -> tuple[Features, Features]:
    """Build two micro-batches of two-row packs that differ only in the first row of each pack.

    input_ids and position_ids: (pack_count, 8), four tokens per row. use_mrope: whether to add 3D positions for M-RoPE.
    """
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * pack_count, device=device)
    shared = {
        POSITION_IDS: positions,
        **({MROPE_POSITION_IDS: positions.unsqueeze(2).expand(-1, -1, 3)} if use_mrope else {}),
    }
    first, second = (
        torch.tensor([[*first_row, 8, 9, 10, 11]] * pack_count, device=device)
        for first_row in ((0, 1, 2, 3), (4, 5, 6, 7))
    )
    return {"input_ids": first, **shared}, {"input_ids": second, **shared}


@torch.no_grad()
def check_pack_isolation(model: torch.nn.Module, packs: tuple[Features, Features], *, name: str) -> None:
    """Raise InvalidSpec if the first row of a pack influences the logits of the second.

    packs: use the micro-batch size of training, at most two, because some attention kernels detect the row boundaries
    from the position ids only at batch size 1.
    """
    was_training = model.training
    model.eval()
    try:
        logits, changed_logits = (compute_logits(model, batch) for batch in packs)
    except TypeError as error:
        raise InvalidSpec(
            f'spec.dataset.packing: model "{name}" does not accept position_ids ({error}); leave packing out'
        ) from error
    model.train(was_training)
    change = (logits[:, 4:] - changed_logits[:, 4:]).abs().max() / logits[:, 4:].abs().max()
    if change > _TOLERANCE:
        raise InvalidSpec(
            f'spec.dataset.packing: model "{name}" does not isolate the rows of a pack: the first row changes the'
            " logits of the second; leave packing out"
        )
