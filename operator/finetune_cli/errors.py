"""What the user must change before anything can start."""

BAD_INPUT = 2  # exit code, as for a wrong flag


class BadInput(Exception):
    """Problems found before anything was started; each is a line that names file or flag, field and what to do."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
