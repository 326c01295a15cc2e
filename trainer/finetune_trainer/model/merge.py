"""The model with what an adapter learned written into its weights."""

from pathlib import Path

from peft import PeftModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune_trainer.model.load import Pretrained, load_weights
from finetune_trainer.vision.save_processor import save_processor


def write_merged(pretrained: Pretrained, adapter: Path, folder: Path) -> None:
    """On one rank, in host memory, which holds the model once: the trained one may be spread over all ranks."""
    unset_hf_deepspeed_config()  # ZeRO-3 would spread this one too
    merged = PeftModel.from_pretrained(load_weights(pretrained, pretrained.dtype), adapter).merge_and_unload()
    merged.save_pretrained(folder)
    pretrained.tokenizer.save_pretrained(folder)
    if pretrained.vision:
        save_processor(pretrained.vision, pretrained.name, folder)
