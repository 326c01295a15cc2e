"""The operator process: watches, leader election, health checks and logging."""
