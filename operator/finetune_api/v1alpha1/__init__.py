"""Defines version v1alpha1 of the FineTuneJob resource: spec, status and reasons as pydantic models."""
