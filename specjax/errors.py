"""Errors that a user can mend."""


class UsageError(ValueError):
    """One sentence that names the flag or field at fault and the fix. The command line prints it and exits with 2."""
