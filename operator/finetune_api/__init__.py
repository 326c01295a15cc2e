"""The API shared by users, operator and trainer; it depends only on pydantic, so that every image can contain it."""
