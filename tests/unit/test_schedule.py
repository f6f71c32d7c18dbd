"""Learning rates: P24, exact end points, every shape."""

import math
from types import SimpleNamespace

import pytest

from shared_ops.errors import UserError
from shared_ops.schedule import SCHEDULES, learning_rate, scheduled_rate


def rate(step, schedule="cosine", peak=1.0, warmup=10, total=100, ratio=0.1, decay=0.2):
    optim = SimpleNamespace(
        lr=peak, warmup_steps=warmup, schedule=schedule, min_lr_ratio=ratio, decay_fraction=decay
    )
    return learning_rate(optim, step, total)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_counts_updates_from_one(schedule):
    assert rate(3, schedule) == 0.3
    assert rate(1, schedule) == 0.1
    assert rate(10, schedule) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("peak, ratio", [(1.0, 0.1), (2.2e-4, 0.1), (3e-4, 0.0), (1e-3, 1.0), (7e-5, 1 / 3)])
def test_ends_exactly_at_the_minimum_and_stays(schedule, peak, ratio):
    for step in (100, 101, 10_000):
        assert rate(step, schedule, peak=peak, ratio=ratio) == peak * ratio


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_never_rises_after_the_warm_up(schedule):
    rates = [rate(step, schedule) for step in range(10, 101)]
    assert all(a >= b for a, b in zip(rates, rates[1:])) and rates[-2] > rates[-1]


def test_values_by_hand():
    # a quarter, a half and three quarters of the way from step 20 to 100, minimum 0.2
    values = [rate(step, "cosine", warmup=20, ratio=0.2) for step in (40, 60, 80)]
    expected = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * x)) for x in (0.25, 0.5, 0.75)]
    assert values == pytest.approx(expected, abs=1e-15) and values[1] == pytest.approx(0.6)
    assert [rate(step, "linear", warmup=20, ratio=0.2) for step in (40, 60, 80)] == pytest.approx(
        [0.8, 0.6, 0.4]
    )
    # the last fifth of 100 steps decays
    assert [rate(step, "wsd") for step in (11, 79, 80)] == [1.0, 1.0, 1.0]
    assert [rate(step, "wsd") for step in (85, 90, 95)] == pytest.approx([0.775, 0.55, 0.325])
    assert [rate(step, "constant") for step in (11, 100, 500)] == [1.0, 1.0, 1.0]


def test_wsd_without_decay_is_constant_and_with_all_of_it_starts_after_the_warm_up():
    assert rate(100, "wsd", decay=0.0) == 1.0
    assert rate(55, "wsd", decay=1.0) == rate(55, "linear")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warm_up_longer_than_the_run_is_cut_off(schedule):
    assert [rate(t, schedule, warmup=10, total=5) for t in (1, 5, 7)] == [0.1, 0.5, 0.5]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_no_warm_up_starts_next_to_the_peak(schedule):
    assert 0.98 < rate(1, schedule, warmup=0) < 1.0


def test_both_spellings_agree():
    plain = scheduled_rate(37, peak=3e-4, warmup_steps=10, total_steps=100, schedule="linear", min_ratio=0.05)
    assert plain == rate(37, "linear", peak=3e-4, ratio=0.05)


def test_bad_arguments():
    with pytest.raises(UserError, match="optim.schedule.*'linea'.*cosine"):
        rate(20, "linea")
    with pytest.raises(ValueError):
        rate(0)
