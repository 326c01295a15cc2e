"""Command-line interface `finetune`, also available as `kubectl finetune`, for local runs and jobs in a cluster."""
