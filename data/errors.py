"""What goes wrong with data, as opposed to configuration. All of it travels between processes."""


class DataError(ValueError):
    """The user's data cannot be used; the message names the file, the line and the fix."""


class BrokenFileError(DataError):
    """A file of a source cannot be read on. file: its number."""

    def __init__(self, message: str, *, file: int = -1) -> None:
        super().__init__(message)
        self.file = file


class CacheError(Exception):
    """Prepared data cannot be written; the message names the disk and the fix.

    full: no space is left, or would not be; otherwise the disk refuses (read-only, permissions).
    """

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


class WorkerDiedError(Exception):
    """A process of ours was killed from outside; the same command may well succeed."""
