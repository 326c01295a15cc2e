"""Defines the error for input that the user has to correct."""

EXIT_BAD_INPUT = 2  # same as typer's exit code for an invalid flag


class BadInput(Exception):
    """Raised for invalid input; each problem is one line with file or flag, field and remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
