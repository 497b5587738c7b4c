"""What goes wrong with data, as opposed to configuration."""


class DataError(ValueError):
    """The user's data cannot be used; the message names the file, the line and the fix."""
