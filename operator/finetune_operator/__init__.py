"""The operator: watches FineTuneJob objects and reconciles their pods with the spec."""
