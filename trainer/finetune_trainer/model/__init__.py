"""Loads the model and its tokenizer, adds LoRA adapters and chooses the attention implementation."""
