"""Derives CEL rules, JSON schema, bounds of the status and validation messages from the models."""
