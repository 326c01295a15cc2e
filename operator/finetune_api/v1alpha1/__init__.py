"""The FineTuneJob resource, version v1alpha1: spec, status and reasons as pydantic models."""
