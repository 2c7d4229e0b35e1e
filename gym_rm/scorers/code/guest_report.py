"""What was counted of the tests of a row, and whose fault an error is. Runs beside the tests."""

from __future__ import annotations

import contextlib

from gym_rm.scorers.code.guest_connection import Connection
from gym_rm.scorers.code.guest_handles import last_instruction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


class BrokenTests(Exception):
    """The tests cannot be run, whatever the model's code does."""


class Report:
    """The cases of the tests of one row that ran and that failed, and the first error: whose it is, kind and message.

    `undefined` has the names that the tests use and never define.
    """

    def __init__(self, connection: Connection, undefined: list[str]) -> None:
        self.connection = connection
        self.undefined = undefined
        self.ran: set[object] = set()
        self.failed: set[object] = set()
        self.error: list[str] = []

    def count(self, case: object, error: BaseException | None = None) -> None:
        """Count a case that ran once more, with its error if it failed."""
        self.ran.add(case)
        if error is not None:
            self.failed.add(case)
            self.note(error)

    def note(self, error: BaseException) -> None:
        """Keep the first error."""
        kind = "" if isinstance(error, BrokenTests) else type(error).__name__
        self.error = self.error or [self.verdict(error), kind, str(error)[:2000]]

    def verdict(self, error: BaseException) -> str:
        """Return how the model's code failed, or "error" if the tests are wrong, whatever this code does."""
        if isinstance(error, BrokenTests):
            return "error"
        if "_gym_rm_raised" in vars(error):  # by the model's code
            known = {PermissionError: "forbidden", MemoryError: "memory"}
            return next((known[kind] for kind in known if isinstance(error, kind)), "exception")
        if isinstance(error, ImportError) and str(error.name).partition(".")[0] == "solution":
            return "exception"
        if not self.connection.requests:
            return "error"
        if isinstance(error, NameError) and str(error).split("'")[1:2] in [[name] for name in self.undefined]:
            return "error"
        is_import = isinstance(error, ImportError) and last_instruction(error.__traceback__).startswith("IMPORT_")
        return "error" if is_import else "wrong_answer"


@contextlib.contextmanager
def counted(report: Report, case: int, handled: bool) -> Iterator[None]:
    """Count a case, and go on if it fails. `handled`: its error is also for a handler of the tests."""
    try:
        yield
    except BaseException as error:
        report.count(case, error)
        if handled:
            raise
    else:
        report.count(case)
