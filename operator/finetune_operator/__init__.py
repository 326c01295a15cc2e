"""Operator that watches FineTuneJob objects and reconciles their pods with the spec."""
