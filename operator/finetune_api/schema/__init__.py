"""Derives the CRD, CEL rules, JSON schema, field reference and validation messages from the models."""
