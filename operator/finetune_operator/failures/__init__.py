"""Pure failure handling: rules, error patterns, evidence, verdicts and restart budgets."""
