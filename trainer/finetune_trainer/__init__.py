"""Runs in every rank of a training pod: reads the spec, loads data and model, trains and publishes the result."""
