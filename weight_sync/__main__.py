"""`python -m weight_sync inspect | convert | diff | parity`: every command has its own --help, and ends at Ctrl-C."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from shared_ops.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, run_cli

COMMANDS = {
    "inspect": "what a file or folder of weights holds",
    "convert": "weights from any format to any other",
    "diff": "two stores, tensor by tensor",
    "parity": "two implementations on the same weights and batch, module by module",
}


def main(argv: Sequence[str]) -> int:
    """Run the command that the first argument names."""
    if argv and argv[0] in COMMANDS:
        try:
            return importlib.import_module(f"weight_sync.{argv[0]}").main(argv[1:])
        except BaseException as error:
            if not _is_interrupt(error):
                raise
            print("interrupted", file=sys.stderr, flush=True)
            return EXIT_INTERRUPTED
    usage = "usage: python -m weight_sync COMMAND …\n" + "".join(
        f"\n  {name:8} {what}" for name, what in COMMANDS.items()
    )
    if argv and argv[0] in ("-h", "--help"):
        print(usage)
        return 0
    print(f"{usage}\n\nerror: {'no command' if not argv else f'{argv[0]!r} is no command'}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether it is Ctrl-C, or what an import or a compiler made of that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which MindSpore makes of Ctrl-C
    code = run_cli(main)
    if code == EXIT_INTERRUPTED:  # a framework that was interrupted can crash when the interpreter ends
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
