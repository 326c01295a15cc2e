"""The pure core: from a job and its observation to the next status and actions."""
