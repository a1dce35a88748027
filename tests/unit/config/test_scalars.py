"""What a plain YAML scalar means, in files and on the command line."""

from __future__ import annotations

import math

import pytest
import yaml

from ppfleetx.config.scalars import parse_bool_word, parse_scalar, parse_value, read_yaml

SCALARS = {
    "null": None,
    "Null": None,
    "~": None,
    "": None,
    "None": None,
    "none": "none",
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "tRue": "tRue",
    "yes": "yes",
    "No": "No",
    "on": "on",
    "off": "off",
    "y": "y",
    "0": 0,
    "-1": -1,
    "+7": 7,
    "1_000": 1000,
    "0x1F": 31,
    "0b101": 5,
    "0x": "0x",
    "0x_": "0x_",
    "0b_": "0b_",
    "010": "010",
    "0o10": "0o10",
    "-010": "-010",
    "12:30": "12:30",
    "1:30.5": "1:30.5",
    "1e5": 1e5,
    "1e-4": 1e-4,
    "5E-5": 5e-5,
    "1e+3": 1000.0,
    "9.99e-1": 0.999,
    "1.": 1.0,
    ".5": 0.5,
    "-.5e1": -5.0,
    ".": ".",
    "._1": "._1",
    ".inf": math.inf,
    "-.inf": -math.inf,
    "inf": "inf",
    "nan": "nan",
    "1.2.3": "1.2.3",
    "2024-01-31": "2024-01-31",
    "???": "???",
    "${Global.seed}": "${Global.seed}",
    "a=b=c": "a=b=c",
    "a#b": "a#b",
    "./data": "./data",
    "=": "=",
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_c02_scalars_have_one_meaning_in_files_and_on_the_command_line(text, value):
    in_file = read_yaml(f"key: {text}")["key"]
    for got in (parse_scalar(text), parse_value(f" {text} "), in_file, read_yaml(f"- {text}\n- 1")[0]):
        assert got == value and type(got) is type(value)


def test_nan_is_a_float():
    assert math.isnan(parse_scalar(".nan")) and math.isnan(parse_scalar(".NaN"))


def test_numbers_of_thousands_of_digits_stay_text():
    for text in ("9" * 5000, "0x" + "f" * 5000, "0b" + "1" * 5000):
        assert parse_scalar(text) == text
    assert parse_scalar("9" * 5000 + ".0") == math.inf


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("On", True), ("OFF", False), ("no", False), ("maybe", None)]
)
def test_words_of_yaml_1_1(text, value):
    assert parse_bool_word(text) is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'2e-5'", "2e-5"),
        ('"null"', "null"),
        ('"a\\tb"', "a\tb"),
        ("[1, 2.5, x, null]", [1, 2.5, "x", None]),
        ("[9e-1, 9.99e-1]", [0.9, 0.999]),
        ("[010, 12:30, yes]", ["010", "12:30", "yes"]),
        ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
        ("{1: a, true: b, 010: c, ~: d}", {"1": "a", "true": "b", "010": "c", "~": "d"}),
        ("#c", "#c"),
        ("x #c", "x #c"),
        ("a: b", "a: b"),
        ("- a", "- a"),
        ("*a", "*a"),
        ("&a b", "&a b"),
        ("!!python/name:os.system", "!!python/name:os.system"),
        ("x]", "x]"),
    ],
)
def test_values_of_the_command_line(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2",
        "{a: 1",
        '"abc',
        "'a' b",
        "[1] [2]",
        "{a: 1, a: 2}",
        "{a: {b: 1, 'b': 2}}",
        "{? [a] : b}",
        "{? {a: b} : c}",
        "[!!python/name:os.system ]",
        "[!!python/object/apply:os.system ['true']]",
        "[!!timestamp 2001-01-01]",
        "[!!set {a}]",
        "[!!binary aGk=]",
        "[!!int foo]",
        "[!!bool maybe]",
        "[!!float x]",
        "[!!map 5]",
        "[!!seq 5]",
        "[!own 5]",
        "[*a]",
        "[&a [*a]]",
        "{a: &a {<<: *a}}",
        "{<<: 5}",
        '["\\UFFFFFFFF"]',
        '["\x00"]',
        "[" * 41 + "]" * 41,
        "[" * 5000,
    ],
)
def test_bad_yaml_is_one_kind_of_error_and_executes_nothing(text):
    with pytest.raises(yaml.YAMLError):
        parse_value(text)


def test_plain_tags_and_merge_keys_work():
    text = "a: &a {xx: 1, y: !!str 5}\nb: &b {<<: *a, xx: 2, z: !!int '7'}\nc: {d: {<<: [*a, *b]}, e: {<<: [*b, *a]}}"
    tree = read_yaml(text)
    assert tree["b"] == {"xx": 2, "y": "5", "z": 7}
    assert tree["c"]["d"] == {"xx": 1, "y": "5", "z": 7}  # the earlier of a list wins
    assert tree["c"]["e"] == {"xx": 2, "y": "5", "z": 7}


def test_a_merged_mapping_may_override_its_own_base_wherever_it_stands():
    """The check for duplicates must not see keys that a merge put there; the own key wins (not so in PyYAML)."""
    tree = read_yaml("p: {q: &b {<<: {x: 1}, x: 2}}\nc: {<<: *b}")
    assert tree == {"p": {"q": {"x": 2}}, "c": {"x": 2}}


def test_duplicate_keys_are_refused_with_name_and_line():
    with pytest.raises(yaml.YAMLError, match=r"(?s)the key 'seed' stands twice.*line 3"):
        read_yaml("Global:\n  seed: 1\n  seed: 2\n")
