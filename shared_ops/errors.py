"""Expected errors and how every command reports them."""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence

EXIT_OK, EXIT_DIFFERENT, EXIT_BAD_INPUT = 0, 1, 2
EXIT_INTERRUPTED = 130  # what shells say of Ctrl-C


class UserError(Exception):
    """Bad input: the message names the file, key or value, what was expected and what to do."""


def run_cli(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a command's `main(argv)`; a `UserError` becomes one readable line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main(sys.argv[1:] if argv is None else argv) or EXIT_OK
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
    except OSError as error:
        if not _is_stdout(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails again when it ends
        if not isinstance(error, BrokenPipeError):  # a pager that was closed needs no word
            print(f"error: standard output cannot be written ({error.strerror})", file=sys.stderr, flush=True)
    return EXIT_BAD_INPUT


def _is_stdout(error: OSError) -> bool:
    """Whether writing to standard output failed: its own errors name no file."""
    return error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF)
