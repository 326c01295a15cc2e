"""Command line `finetune` or `kubectl finetune`: runs jobs on the local host and describes jobs of a cluster."""
