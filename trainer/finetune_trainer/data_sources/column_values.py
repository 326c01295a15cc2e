"""Checks column values of rows; errors contain the row, the column, the expected and the found value."""

import json

from finetune_supervisor.contract import parse_json
from finetune_trainer.data_sources.readers import Row, describe_value
from finetune_trainer.errors import DatasetError


def get_text(row: Row, name: str) -> str:
    """Return the text of a column. Raises: DatasetError if the value is not text."""
    return check_text(f"{row.origin}, column {name}", row.columns[name])


def get_list(row: Row, name: str) -> list[object]:
    """Return the list in a column; text is parsed as JSON, for CSV files. Raises: DatasetError if it is not a list."""
    value = row.columns[name]
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except json.JSONDecodeError as error:
            raise DatasetError(
                f"{row.origin}, column {name}: expected a list of turns, found text that is not JSON"
                f" (at character {error.pos + 1}: {error.msg})"
            ) from error
    if not isinstance(value, list) or not value:
        raise DatasetError(f"{row.origin}, column {name}: expected a list of turns, found {describe_value(value)}")
    return value


def check_object(location: str, value: object) -> dict[str, object]:
    """Return the value if it is a JSON object. Raises: DatasetError whose message begins with `location`."""
    if not isinstance(value, dict):
        raise DatasetError(f"{location}: expected an object, found {describe_value(value)}")
    return value


def check_text(location: str, value: object) -> str:
    """Return the value if it is text. Raises: DatasetError whose message begins with `location`."""
    if not isinstance(value, str):
        raise DatasetError(f"{location}: expected text, found {describe_value(value)}")
    return value
