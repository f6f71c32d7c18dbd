"""`python -m weight_sync inspect | convert | diff | parity`: every command has its own --help."""

import importlib
import sys
from collections.abc import Sequence

from shared_ops.errors import EXIT_BAD_INPUT, run_cli

COMMANDS = {
    "inspect": "what a file or folder of weights holds",
    "convert": "weights from any format to any other",
    "diff": "two stores, tensor by tensor",
    "parity": "two implementations on the same weights and batch, module by module",
}


def main(argv: Sequence[str]) -> int:
    """Run the command that the first argument names."""
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(f"weight_sync.{argv[0]}").main(argv[1:])
    usage = "usage: python -m weight_sync COMMAND …\n" + "".join(
        f"\n  {name:8} {what}" for name, what in COMMANDS.items()
    )
    if argv and argv[0] in ("-h", "--help"):
        print(usage)
        return 0
    print(f"{usage}\n\nerror: {'no command' if not argv else f'{argv[0]!r} is no command'}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(run_cli(main))
