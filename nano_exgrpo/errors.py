"""The two ways in which a command ends early, each with one sentence for the user."""


class InputError(ValueError):
    """The user's input cannot be used. The message is one sentence that names it and the fix.

    Scripts print it and exit with code 2; it never comes with a traceback."""


class Interrupted(Exception):
    """The user ended the run before there was anything to save."""
