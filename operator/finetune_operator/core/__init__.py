"""Pure decision logic that derives the next status and actions from a job and its observation."""
