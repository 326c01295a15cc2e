"""Build a tiny model, tokenizer and chat dataset for tests and the demo, from Python's built-in help topics.

`python -m testing.models.tiny_text DIR` creates DIR/model, DIR/train.jsonl and DIR/eval.jsonl, and writes the same rows
as preference pairs to DIR/train.pairs.jsonl and DIR/eval.pairs.jsonl.
"""

import argparse
import json
import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from finetune_trainer.parallel.model_state import list_saved_buffers

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VOCABULARY_SIZE = 1024
_MAX_POSITIONS = 512

Row = dict[str, Any]


@dataclass(frozen=True)
class TinyFiles:
    """Paths of the model, the training rows and the evaluation rows."""

    model: Path
    train: Path
    eval: Path


def get_preferences_path(rows: Path) -> Path:
    """Return the path of the preference pairs for a file of chat rows."""
    return rows.with_suffix(".pairs.jsonl")


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Save the model so that pods of another user can read it; safetensors creates files with mode 0600."""
    model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def save_bfloat16_model(
    folder: Path, *, vocab_size: int, hidden_size: int, intermediate_size: int, layers: int, tied: bool = False
) -> None:
    """Save a model with random 16-bit weights and heads of 64 elements, whose size matters and whose outputs do not."""
    heads = hidden_size // 64
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def fill_saved_buffers(model: torch.nn.Module) -> None:
    """Fill the buffers that are saved with the model, such as the biases of routers, with random values."""
    for buffer in list_saved_buffers(model).values():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.0)


def build(folder: Path, *, rows: int = 400, eval_rows: int = 40, seed: int = 0) -> TinyFiles:
    """Create model, tokenizer and rows below `folder`, reproducibly."""
    files = TinyFiles(folder / "model", folder / "train.jsonl", folder / "eval.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(files.model)
    save_model(build_model(len(tokenizer), seed=seed), files.model)
    all_rows = list(generate_chat_rows())
    if rows + eval_rows > len(all_rows):
        raise ValueError(f"{rows} + {eval_rows} rows requested; the help topics contain {len(all_rows)}")
    step = len(all_rows) // (rows + eval_rows)
    selected_rows = all_rows[::step][: rows + eval_rows]
    eval_indices = {int(index * len(selected_rows) / eval_rows) for index in range(eval_rows)}
    for path, split in (
        (files.train, [row for index, row in enumerate(selected_rows) if index not in eval_indices][:rows]),
        (files.eval, [row for index, row in enumerate(selected_rows) if index in eval_indices]),
    ):
        write_jsonl(path, split)
        write_jsonl(get_preferences_path(path), [convert_to_preference(row) for row in split])
    return files


@cache
def train_tokenizer() -> str:
    """Return the JSON of a tokenizer that was trained with the help topics."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        topics.values(),
        trainers.BpeTrainer(
            vocab_size=_VOCABULARY_SIZE,
            special_tokens=list(_SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return str(tokenizer.to_str())


def build_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(train_tokenizer()),
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=_MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(vocabulary_size: int, *, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary_size,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.1,  # 0.02 is too small for adapters, which cannot scale frozen embeddings
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def generate_chat_rows() -> Iterator[Row]:
    """Yield a question and an answer for each paragraph of the help topics; the answers vary in length."""
    for topic, text in topics.items():
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
        for number, paragraph in enumerate(filter(None, paragraphs), start=1):
            answer = textwrap.shorten(paragraph, width=120 + 60 * (number % 5), placeholder="")
            if len(answer) < 30:
                continue
            question = f"What does the manual say about {topic}, part {number}?"
            yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def convert_to_preference(row: Row) -> Row:
    """Convert a row to a preference pair; the rejected answer is the first two thirds of the words in reverse order."""
    words = row["messages"][-1]["content"].split()
    return {**row, "rejected_response": " ".join(reversed(words[: len(words) - len(words) // 3]))}


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--eval-rows", type=int, default=40)
    options = parser.parse_args()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    files = build(options.folder, rows=options.rows, eval_rows=options.eval_rows)
    for path in (files.model, files.train, files.eval):
        print(path)


if __name__ == "__main__":
    main()
