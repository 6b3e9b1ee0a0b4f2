"""The one way in which this package says no."""


class Refused(Exception):
    """The job must not be done: `exit_code` of the command, and why."""

    def __init__(self, exit_code: int, reason: str):
        super().__init__(exit_code, reason)
        self.exit_code = exit_code
        self.reason = reason

    def __str__(self) -> str:
        return f"exit {self.exit_code}: {self.reason}"
