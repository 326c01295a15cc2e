"""The report of a run, report.html, and the attempt history of a job, which its summary contains."""
