"""The Paddle versions that this project was tested with; requirements.txt says the same."""

from __future__ import annotations

import re

from ppfleetx.config.errors import Problem, UserError

#: first supported version, and the first that is not
FIRST, END = (3, 3, 1), (3, 4, 0)


def check_paddle_version() -> None:
    """Local. To be called before anything else of Paddle is used: another version may lack what is imported later.

    Raises:
        UserError: Paddle is missing or of another version.
    """
    try:
        from paddle import __version__ as found
    except ModuleNotFoundError:
        found = "none"
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:3])
    if not FIRST <= numbers < END:
        rule = f"PaddlePaddle from {'.'.join(map(str, FIRST))} to below {END[0]}.{END[1]} is needed"
        raise UserError(Problem("paddle.__version__", found, rule, "pip install -r requirements.txt"))
