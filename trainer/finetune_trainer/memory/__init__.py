"""Forecast the GPU and host memory of a job before any of it is allocated."""
