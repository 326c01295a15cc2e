"""API that users, operator and trainer share; it depends only on pydantic, so that every image can contain it."""
