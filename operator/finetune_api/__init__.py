"""API types shared by the CLI, operator and trainer; the package depends only on pydantic to fit into every image."""
