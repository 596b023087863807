"""The exception for mistakes that a user can make."""


class UserError(Exception):
    """A mistake of the user; its text is one line that says what is wrong, where, and what to do.

    Commands print this line without a traceback and exit with status 2 (`mesanet_jax.cli.run`).
    """
