"""Demo that runs the example job as local processes, without a cluster."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from testing.models import tiny_text
from testing.models.loss_curve import read_losses, render_loss_curve
from testing.processes.operator_stack import build_example_job


def run_locally() -> int:
    """Run the example job with `finetune run`, print its loss curve and result files, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="finetune-demo-") as scratch:
        folder = Path(scratch)
        tiny_text.build(folder / "data")
        job_file = folder / "job.yaml"
        job_file.write_text(yaml.safe_dump(build_example_job("demo")))
        command = [sys.executable, "-m", "finetune_cli", "run", str(job_file), "--output", str(folder / "out")]
        code = subprocess.run([*command, "--volume", f"data={folder / 'data'}"], check=False).returncode
        if code == 0:
            (output,) = (folder / "out").glob("*/demo")
            print("loss by step:\n" + render_loss_curve(read_losses(output)))
            for path in sorted((output / "result").iterdir()):
                print(f"  {path.name:36} {path.stat().st_size:>10,} bytes")
        return code
