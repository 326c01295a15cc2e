"""Commands that read and control the jobs of a cluster."""
