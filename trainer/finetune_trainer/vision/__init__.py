"""Supports vision-language models, in particular image and video processing and the freezing of components."""
