"""Expected errors and how every command reports them."""

import sys
from collections.abc import Callable, Sequence

EXIT_OK, EXIT_DIFFERENT, EXIT_BAD_INPUT = 0, 1, 2


class UserError(Exception):
    """Bad input: the message names the file, key or value, what was expected and what to do."""


def run_cli(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a command's `main(argv)`; a `UserError` becomes one readable line and exit code 2."""
    try:
        return main(sys.argv[1:] if argv is None else argv) or EXIT_OK
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
