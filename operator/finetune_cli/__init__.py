"""`finetune` and `kubectl finetune`: runs jobs on the local host, and shows jobs of a cluster."""
