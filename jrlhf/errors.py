"""The one exception that users are meant to see."""


class UserError(Exception):
    """Bad input, in one sentence: what is wrong, its value, the remedy. The program prints it and exits with 2."""
