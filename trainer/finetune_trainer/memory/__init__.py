"""Forecast of the GPU and host memory that a job needs, computed before any of it is allocated."""
