"""How B's tensor comes from A's: what is found, and the words and facts a report has of it."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Explanation(NamedTuple):
    """How B's tensor comes from A's: `kind` for counting, `text` to read, `facts` for programs.

    `whole` is False where it accounts for a part of the tensor only.
    """

    kind: str
    text: str
    facts: dict[str, Any]
    whole: bool = True

    def as_dict(self) -> dict[str, Any]:
        """A row's "explanation", as --json writes it."""
        return {"kind": self.kind, "text": self.text, "whole": self.whole, **self.facts}


def is_explained(row: dict[str, Any]) -> bool:
    """Whether a tensor's row in the report has an explanation for all of it."""
    return bool(row["explanation"]) and row["explanation"]["whole"]


def not_looked_at(what: str) -> Explanation:
    """In place of what takes more memory than there may be."""
    return Explanation("not looked at", f"not looked at for {what}: --max-memory is too little", {}, whole=False)


def listed(items: Sequence[Any], limit: int = 6) -> str:
    """The first items in words, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(str(item) for item in items[:limit]) + more
