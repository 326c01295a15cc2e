"""Supports vision-language models: model families, image and video processing, placeholders, freezing."""
