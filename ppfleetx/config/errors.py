"""What a user's mistake looks like: the YAML key, the value got, the rule, one fix; exit code 2, no traceback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: exit code of every command for a mistake in what the user handed in
EXIT_USER_ERROR = 2


@dataclass(frozen=True)
class Problem:
    """One mistake, in the user's words.

    Attributes:
        key: YAML key or command line option (`Global.micro_batch_size`, `-c`).
        value: the value got, printed with `repr` (cut if it is long).
        rule: what must hold, naming every number that takes part.
        fix: one thing to do about it, if there is one that is surely right.
    """

    key: str
    value: Any
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        value = repr(self.value)
        value = value if len(value) <= 200 else value[:200] + "…"
        lines = [f"{self.key} = {value}", f"  rule: {self.rule}"]
        if self.fix:
            lines.append(f"  fix:  {self.fix}")
        return "\n".join(lines)


class UserError(Exception):
    """The user's input cannot be used; carries every problem found, not only the first."""

    def __init__(self, *problems: Problem):
        if not problems:
            raise ValueError("a UserError needs at least one Problem")
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))
