"""A run that was stopped, and a copy of it to go on from. A file may have a `stopped` of its own."""

import shutil

import pytest

from tests.resume.short_run import SMALL
from tests.training import train


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """3 updates, each saved; copied by tests that go on from it."""
    run = train(tmp_path_factory.mktemp("stopped"), *SMALL, "Engine.max_steps=3")
    assert run.code == 0
    return run


@pytest.fixture
def copy(stopped, tmp_path):
    """A copy of the stopped run's folder."""
    return shutil.copytree(stopped.output, tmp_path / "run")
