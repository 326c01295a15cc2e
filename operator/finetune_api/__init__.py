"""API types shared by the CLI, the operator and the trainer. The package depends only on pydantic and PyYAML."""
