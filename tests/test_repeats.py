"""Repeats are found where a search of the whole text finds them, and copies go on like there."""

import random

import pytest

from hf_heterospec.repeats import LONGEST_REPEAT, Repeat, Repeats, copy


def longest_repeat(tokens):
    """By comparing the end with every place."""
    best = Repeat(0, 0)
    for place in reversed(range(len(tokens) - 1)):
        length = 0
        while length < min(LONGEST_REPEAT, place + 1) and tokens[place - length] == tokens[-1 - length]:
            length += 1
        if length > max(best.length, 1):
            best = Repeat(length, place + 1)
    return best


@pytest.mark.parametrize("num_kinds", [2, 5, 40])
@pytest.mark.parametrize("step", [1, 4])
def test_a_growing_text_is_searched_as_if_from_the_start(num_kinds, step):
    draw = random.Random(num_kinds)
    tokens = [draw.randrange(num_kinds) for _ in range(200)]
    repeats = Repeats()
    found = [repeats.find(tokens[:end]) for end in range(1, 200, step)]
    assert found == [longest_repeat(tokens[:end]) for end in range(1, 200, step)]
    assert any(repeat.length for repeat in found)


def test_one_token_alone_is_no_repeat():
    assert Repeats().find([7, 1, 7]).length == 0
    assert Repeats().find([]).length == 0


def test_the_latest_of_equal_repeats_is_followed():
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    repeat = Repeats().find(tokens)
    assert repeat == (2, 5)
    assert copy(tokens, repeat, 3) == [4, 1, 2]


def test_a_copy_that_reaches_its_own_start_goes_round():
    tokens = [9, 1, 2, 3, 1, 2, 3]
    repeat = Repeats().find(tokens)
    assert repeat == (3, 4)
    assert copy(tokens, repeat, 7) == [1, 2, 3, 1, 2, 3, 1]
