"""The one exception for mistakes a user can make."""


class UserError(Exception):
    """A mistake of the user's: its text is one line saying what is wrong, where, and what to do.

    Entry points print the line without a traceback and exit with status 2 (`mesanet_jax.cli`).
    """
