"""The model and its tokenizer, whole or with LoRA adapters."""
