"""The one exception that users see."""


class UserError(Exception):
    """A mistake that a user can make, told in one sentence that says what to do; the command line exits with 2."""
