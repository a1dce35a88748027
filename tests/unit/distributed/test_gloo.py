"""The CPU backend's guard on Paddle's version and private names."""

from __future__ import annotations

import paddle
import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.distributed.gloo import private


def test_this_paddle_is_supported():
    private.check()
    for name in private.PRIVATE_NAMES:
        assert name.purpose and name.can_go_when


@pytest.mark.parametrize("version", ["3.2.2", "3.4.0", "2.6.1", "0.0.0"])
def test_other_versions_are_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(paddle, "__version__", version)
    with pytest.raises(UserError, match=rf"3\.3\.x, this is {version}"):
        private.check()


def test_a_missing_name_is_named(monkeypatch):
    gone = private.PrivateName("paddle.distributed.collective", "_gone.away", "made up", "never")
    monkeypatch.setattr(private, "PRIVATE_NAMES", (gone,))
    with pytest.raises(RuntimeError, match=rf"{paddle.__version__} lacks paddle.distributed.collective._gone.away"):
        private.check()
