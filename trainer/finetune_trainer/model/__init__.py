"""Loads models and tokenizers, adds LoRA adapters and chooses the attention implementation."""
