"""The random-number streams and torch's settings that surround a function."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from distribute import ambient
from distribute.ambient import Fold, Settings, Streams
from distribute.forked import unchanged_environment


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    streams, settings = Streams.capture(), Settings.capture()
    yield
    streams.restore()
    settings.apply()


def draw() -> tuple[Any, ...]:
    """Draws from every stream: integers, floats and the normal ones, which hold a spare."""
    return (
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    )


# -- streams -----------------------------------------------------------------------------------


def test_a_restored_state_draws_the_same_again():
    streams = Streams.capture()
    first = draw()
    later = draw()

    streams.restore()

    assert draw() == first
    assert draw() == later
    assert first != later


def test_a_state_survives_a_journey():
    streams = Streams.capture()
    first = draw()

    pickle.loads(pickle.dumps(streams)).restore()

    assert draw() == first


def test_the_spare_of_a_normal_draw_is_part_of_the_state():
    np.random.randn()
    random.gauss(0, 1)
    streams = Streams.capture()
    first = draw()

    streams.restore()

    assert draw() == first


def test_capturing_draws_nothing():
    streams = Streams.capture()

    assert Streams.capture().torch == streams.torch
    assert Streams.capture().python == streams.python


def test_a_seed_is_drawn_from_nothing():
    streams = Streams.capture()

    numbers = {streams.seed() for _ in range(3)}

    assert len(numbers) == 1
    assert Streams.capture().torch == streams.torch


def test_a_seed_is_a_function_of_the_state():
    torch.manual_seed(5)
    first = Streams.capture().seed()
    torch.rand(1)
    later = Streams.capture().seed()
    torch.manual_seed(5)

    assert Streams.capture().seed() == first != later
    assert 0 <= first < 2**63


def test_a_seed_is_the_same_in_every_process_and_on_every_machine():
    assert Streams(torch=b"state", python=None, numpy=None).seed() == 50142402275845325


def test_a_seed_is_the_start_of_every_stream():
    ambient.seed_all(11)
    first = draw()
    ambient.seed_all(12)
    other = draw()
    ambient.seed_all(11)

    assert draw() == first
    assert not set(first) & set(other)


def test_a_seeded_function_draws_what_a_seeded_program_draws():
    ambient.seed_all(11)
    found = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)

    assert torch.equal(found[0], torch.rand(3))
    assert found[1:] == (random.random(), np.random.rand())


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_every_valid_seed_is_one_for_every_generator(seed: int):
    ambient.seed_all(seed)
    first = draw()
    ambient.seed_all(seed)

    assert draw() == first


# -- folding the rank in -----------------------------------------------------------------------


def folded(rank: int) -> tuple[Any, ...]:
    """What a rank draws after the fold, from the common stream."""
    ambient.seed_all(3)
    Fold(rank)()
    return draw()


def test_rank_0_draws_what_a_single_process_draws():
    ambient.seed_all(3)
    alone = draw()

    assert folded(0) == alone


def test_other_ranks_draw_what_no_other_rank_draws():
    draws = [folded(rank) for rank in range(16)]

    for stream in zip(*draws, strict=True):
        assert len(set(stream)) == 16


def test_a_fold_is_a_function_of_rank_and_state():
    assert folded(5) == folded(5)


def test_a_rank_is_folded_in_once():
    ambient.seed_all(3)
    fold = Fold(2)
    fold()
    first = draw()
    before = Streams.capture()

    fold()

    assert Streams.capture().torch == before.torch
    assert first == folded(2)


# -- settings ----------------------------------------------------------------------------------


def test_settings_are_those_that_were_captured():
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = True
    wanted = Settings.capture()
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False

    pickle.loads(pickle.dumps(wanted)).apply()

    assert Settings.capture() == wanted
    assert torch.get_default_dtype() == torch.float64
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.deterministic


@pytest.mark.parametrize("warn_only", [True, False])
def test_deterministic_algorithms(warn_only: bool):
    with unchanged_environment():
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        wanted = Settings.capture()
        torch.use_deterministic_algorithms(False)

        wanted.apply()

    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only


def test_what_is_the_same_already_stays():
    before = Settings.capture()

    before.apply()

    assert Settings.capture() == before
