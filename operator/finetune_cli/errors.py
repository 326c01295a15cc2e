"""Defines the error for input that the user has to correct."""

EXIT_BAD_INPUT = 2  # same as the exit code of typer for an invalid flag


class BadInput(Exception):
    """Error for invalid input; each problem is one line with file or flag, field and remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
