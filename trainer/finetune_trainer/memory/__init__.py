"""What a job will need of GPU and host memory, known before any of it is used."""
