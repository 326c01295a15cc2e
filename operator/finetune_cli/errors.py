"""The error for input that the user has to correct."""

EXIT_BAD_INPUT = 2  # the exit code of typer for an invalid flag


class BadInput(Exception):
    """Problems found before anything was started; each is a line with file or flag, field and remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
