"""Edits of this tree that make a "next release", which differs in spec, status, defaults and version."""

API, CORE = "operator/finetune_api/v1alpha1", "operator/finetune_operator/core"
# Edits that make the next release, as (file, text, replacement).
NEXT_RELEASE_EDITS = (
    # one more spec field, and one in a section that can be changed while a job is suspended
    (
        f"{API}/job.py",
        "    num_nodes: int = Field(",
        '    note: Literal["set by a user"] | None = Field(default=None, description="A note.")\n'
        "    num_nodes: int = Field(",
    ),
    (
        f"{API}/job.py",
        "    nccl: Nccl = Field(",
        '    mtu: int | None = Field(default=None, description="Bytes per packet.")\n    nccl: Nccl = Field(',
    ),
    # another value of the status, and one more field
    (
        f"{API}/status.py",
        'QUEUED = "Queued"\n    STARTING = "Starting"',
        'QUEUED = "Queued"\n    STARTING = "Launching"',
    ),
    (
        f"{API}/status.py",
        "    restarts: int = Field(default=0",
        '    release_note: str = Field(default="", description="A note.")\n    restarts: int = Field(default=0',
    ),
    (
        f"{CORE}/derive_status.py",
        '            "output": ',
        '            "release_note": "next",\n            "output": ',
    ),
    # other defaults, of the operator and of the trainer
    (f"{API}/job.py", "        default=600,\n", "        default=660,\n"),
    (f"{API}/training.py", "save_steps: int = Field(default=100", "save_steps: int = Field(default=150"),
    ("pyproject.toml", 'version = "0.1.0"', 'version = "0.2.0"'),
)
