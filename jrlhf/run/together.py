"""`together`: if one process of a run fails, all end."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import jax

from jrlhf.errors import FAILED
from jrlhf.run.cluster import heartbeat
from jrlhf.run.processes import several

_CUT_OFF = ("Gloo", "UNAVAILABLE", "Connection")  # in errors of a process that lost another one


@contextmanager
def together(code_of: Callable[[BaseException], int | None]) -> Iterator[None]:
    """If the block fails in this process and there are others, ends this process at once; the others then end, too.

    Otherwise it would wait at its end for the others, while they wait for it in a collective.

    code_of: returns the exit code of an error that is already printed, or None to print its traceback.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized() or not several():
            raise
        code = code_of(error)
        if code is None and (seconds := heartbeat()) and any(word in str(error) for word in _CUT_OFF):
            time.sleep(1.5 * seconds)  # in this time the watch names the process that failed first
        if code is None:
            traceback.print_exc()
        if code in (None, FAILED):
            print(
                f"process {jax.process_index()} of {jax.process_count()} ends, and with it the run: if the error above "
                "is that a connection was closed, another process failed first, and its output says why",
                file=sys.stderr,
            )
        elif not isinstance(error, KeyboardInterrupt):
            # All processes may have the same error, such as a bad config; the first must not cut off others' output.
            with suppress(Exception):
                jax.distributed.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED if code is None else code)
