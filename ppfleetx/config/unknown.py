"""What stands for a value that has a problem already: a rule that computes with it is stopped, so that one mistake is
reported once."""

from __future__ import annotations

from typing import Any, NoReturn


class Stopped(Exception):
    """A rule touched `UNKNOWN`: it can be judged only after the value has been mended."""


class _Unknown:
    def _stop(self, *_: Any) -> NoReturn:
        raise Stopped

    __getattr__ = __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __format__ = _stop
    __add__ = __radd__ = __mul__ = __rmul__ = __neg__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _stop
    __lt__ = __le__ = __gt__ = __ge__ = _stop
    __eq__ = __ne__ = _stop
    __hash__ = object.__hash__


#: takes the place of a section or value that is wrong, misspelt or missing; only `is` may be asked of it
UNKNOWN: Any = _Unknown()
