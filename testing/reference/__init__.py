"""Compares trainings of the trainer with a naive computation from definitions, for random combinations of options."""
