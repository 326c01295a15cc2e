"""The operator: watches FineTuneJob objects and keeps their pods as they should be."""
