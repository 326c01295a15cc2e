"""`finetune` and `kubectl finetune`: the same job on this machine, and a readable view of it on a cluster."""
