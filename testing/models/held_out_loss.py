"""Print the loss on assistant turns with and without an adapter: held_out_loss.py MODEL ADAPTER ROWS."""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(model_folder: str, adapter_folder: str, rows_file: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rows = [json.loads(line)["messages"] for line in Path(rows_file).read_text().splitlines()[:32]]
    base_model = AutoModelForCausalLM.from_pretrained(model_folder)
    losses = {"base": compute_mean_loss(base_model, tokenizer, rows)}
    losses["adapted"] = compute_mean_loss(PeftModel.from_pretrained(base_model, adapter_folder), tokenizer, rows)
    print(json.dumps(losses))


def compute_mean_loss(model: torch.nn.Module, tokenizer: AutoTokenizer, rows: list[list[dict[str, str]]]) -> float:
    """Return the mean loss per token over the last turn of each conversation."""
    total, count = 0.0, 0
    for messages in rows:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        prompt_length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        labels = ids.clone()
        labels[:, :prompt_length] = -100
        tokens = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * tokens
        count += tokens
    return total / count


if __name__ == "__main__":
    main(*sys.argv[1:])
