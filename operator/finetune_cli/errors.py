"""The error for input that the user has to correct."""

EXIT_BAD_INPUT = 2  # exit code, as for a wrong flag


class BadInput(Exception):
    """Problems found before anything was started; each is a line with file or flag, field and remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
