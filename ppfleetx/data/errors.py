"""What is wrong with a file, told by who reads it to who knows what the user wrote."""

from __future__ import annotations


class BadInputError(Exception):
    """A file that cannot be used; becomes a UserError where the option or key that named it is known.

    Attributes:
        rule: what must hold of which file.
        fix: what to do about it, or "".
    """

    def __init__(self, rule: str, fix: str = ""):
        self.rule = rule
        self.fix = fix
        super().__init__(rule)
