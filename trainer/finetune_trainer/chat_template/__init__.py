"""Renders conversations with the chat template of a model and locates the text to train on."""
