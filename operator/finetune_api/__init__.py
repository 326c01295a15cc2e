"""The contract between users, operator and trainer; it imports pydantic alone, so that every image can carry it."""
