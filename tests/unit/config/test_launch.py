"""The launcher's variables: half set, or not numbers."""

from __future__ import annotations

import pytest

from ppfleetx.config import UserError, check_launch, nodes_of_launch, rank_of_launch, world_size_of_launch
from ppfleetx.config.launch import master_address

TWO = {
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.2:6170",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6170",
    "PADDLE_MASTER": "10.0.0.1:49178",
}


def test_what_the_launcher_sets_is_read():
    check_launch(TWO)
    check_launch({})
    assert (world_size_of_launch(TWO), rank_of_launch(TWO), master_address(TWO)) == (2, 1, ("10.0.0.1", 49178))
    assert master_address({**TWO, "PADDLE_MASTER": ""}) == ("10.0.0.1", 6170)
    assert master_address({**TWO, "MASTER_ADDR": "one", "MASTER_PORT": "7"}) == ("one", 7)
    assert nodes_of_launch({"PADDLE_NNODES": "3", "PADDLE_TRAINERS_NUM": "2"}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"PADDLE_TRAINER_ID": "x"}, ["PADDLE_TRAINER_ID = 'x'", "whole number"]),
        ({"PADDLE_TRAINER_ID": "-1"}, ["PADDLE_TRAINER_ID = '-1'", "at least 0"]),
        ({"PADDLE_TRAINER_ID": "2"}, ["PADDLE_TRAINER_ID = 2", "0..1"]),
        ({"PADDLE_TRAINER_ID": None}, ["PADDLE_TRAINER_ID = None", "PADDLE_TRAINERS_NUM is 2"]),
        ({"PADDLE_TRAINERS_NUM": None}, ["PADDLE_TRAINER_ID = 1", "0..0"]),
        ({"PADDLE_TRAINERS_NUM": "0"}, ["PADDLE_TRAINERS_NUM = '0'", "at least 1"]),
        ({"PADDLE_TRAINERS_NUM": "3"}, ["PADDLE_TRAINER_ENDPOINTS = '10.0.0.1", "PADDLE_TRAINERS_NUM 3"]),
        ({"PADDLE_TRAINER_ENDPOINTS": None}, ["PADDLE_TRAINER_ENDPOINTS = None"]),
        ({"PADDLE_CURRENT_ENDPOINT": ""}, ["PADDLE_CURRENT_ENDPOINT = ''"]),
        ({"PADDLE_MASTER": "here"}, ["PADDLE_MASTER = 'here'", "host:port"]),
        ({"PADDLE_MASTER": "here:99999"}, ["PADDLE_MASTER = 'here:99999'", "65535"]),
    ],
)
def test_half_set_variables_are_named(change, words):
    with pytest.raises(UserError) as caught:
        check_launch({name: value for name, value in {**TWO, **change}.items() if value is not None})
    assert all(word in str(caught.value) for word in (*words, "paddle.distributed.launch")), caught.value


def test_nodes_must_be_numbers():
    with pytest.raises(UserError, match="PADDLE_NNODES = 'two'"):
        nodes_of_launch({"PADDLE_NNODES": "two"})
