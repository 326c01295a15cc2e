"""Checks of a user command that runs: whether its ranks have joined a process group, and which GPUs it uses."""
