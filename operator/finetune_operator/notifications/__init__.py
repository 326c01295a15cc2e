"""Notifications about transitions of jobs, as CloudEvents over HTTP (decisions/136)."""
