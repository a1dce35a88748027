"""The pretend device is built once; where it cannot be, its tests are skipped."""

from __future__ import annotations

import pytest

from tests.device.build import NoDevice, device_folder


@pytest.fixture(scope="session", autouse=True)
def device():
    """The folder of the built device."""
    try:
        return device_folder()
    except NoDevice as reason:
        pytest.skip(str(reason))
