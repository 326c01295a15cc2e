"""Operator process with watches, leader election, health checks and logging."""
