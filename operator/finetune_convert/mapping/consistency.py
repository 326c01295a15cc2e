"""Resolves combinations of options that the operator rejects, after all options are converted."""

from collections.abc import Callable

from finetune_convert.conversion import EntryEffect
from finetune_convert.job_draft import JobDraft

EIGHT_BIT = "adamw_8bit"


def make_consistent(draft: JobDraft) -> None:
    """Remove one of two settings that exclude each other, with an entry."""
    for resolve in _RESOLUTIONS:
        resolve(draft)


def _keep_quantized_weights_whole(draft: JobDraft) -> None:
    preset = str(draft.get("deepspeed.preset") or "")
    if draft.get("lora.quantization") is None or not ("fsdp" in draft.spec or preset.startswith("zero3")):
        return
    draft.spec.pop("fsdp", None)
    kept = "zero2_offload" if preset.endswith("offload") else "zero2"
    draft.spec["deepspeed"] = {"preset": kept}
    message = f"4-bit weights cannot be sharded here; {kept} shards gradients and optimizer states"
    draft.note("lora.quantization", EntryEffect.CHANGED, message, field="deepspeed.preset")


def _keep_eight_bit_moments_whole(draft: JobDraft) -> None:
    if draft.get("training.optim") != EIGHT_BIT or not {"fsdp", "deepspeed"} & draft.spec.keys():
        return
    draft.set("training.optim", "adamw_torch_fused")
    draft.note(
        "optim",
        EntryEffect.CHANGED,
        "moments in 8 bits cannot be sharded here; they are float32",
        field="training.optim",
    )


def _drop_rates_of_frozen_parts(draft: JobDraft) -> None:
    frozen = draft.get("model.freeze")
    frozen = frozen if isinstance(frozen, list) else ["vision", "aligner"]
    for part in ("vision", "aligner"):
        field = f"{part}LearningRate"
        if part in frozen and draft.get(f"training.{field}") is not None:
            del draft.spec["training"][field]
            message = f"the {part} part is frozen in the input, so that its learning rate has no effect"
            draft.note(field, EntryEffect.UNUSED, message, field=f"training.{field}")


def _order_pixels(draft: JobDraft) -> None:
    low, high = draft.get("model.minPixels"), draft.get("model.maxPixels")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        del draft.spec["model"]["minPixels"]
        draft.note(
            "min_pixels", EntryEffect.CHANGED, f"{low} is more than the maximum of {high}", field="model.minPixels"
        )


_RESOLUTIONS: tuple[Callable[[JobDraft], None], ...] = (
    _keep_quantized_weights_whole,
    _keep_eight_bit_moments_whole,
    _drop_rates_of_frozen_parts,
    _order_pixels,
)
