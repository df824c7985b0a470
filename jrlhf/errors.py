"""The one exception that users are meant to see, and what a command line makes of it."""

import sys
from collections.abc import Callable

DONE, BAD_INPUT, INTERRUPTED = 0, 2, 130


class UserError(Exception):
    """Bad input, in one sentence: what is wrong, its value, the remedy. The program prints it and exits with 2."""


def exit_code(run: Callable[[], None]) -> int:
    """Of a command: 0 done, 2 bad input, 130 interrupted, as shells have it."""
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read has enough
        pass
    return DONE
