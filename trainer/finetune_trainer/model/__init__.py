"""Load the model and its tokenizer, add LoRA adapters and choose the attention implementation."""
