"""Forecast the GPU and host memory of a job before the job allocates it."""
