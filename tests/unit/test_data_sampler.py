"""The sampler: each row once an epoch, another order each time, no dependence on ranks or batch size."""

import numpy as np
import pytest

from shared_ops.data.sampler import Batches, Sampler
from shared_ops.errors import UserError


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 1000, 65537])
def test_every_epoch_is_a_permutation(n):
    sampler = Sampler(n, seed=3)
    for epoch in (0, 1, 12345):
        rows = sampler.indices(epoch * n, n)
        assert rows.dtype == np.int64
        np.testing.assert_array_equal(np.sort(rows), np.arange(n))


def test_epochs_and_seeds_have_their_own_order():
    orders = [tuple(Sampler(1000, seed).indices(epoch * 1000, 1000))
              for seed in (0, 1, 2**63, -1) for epoch in range(3)]
    assert len(set(orders)) == len(orders)
    assert tuple(range(1000)) not in orders
    assert {tuple(Sampler(3, 0).indices(3 * epoch, 3)) for epoch in range(200)} == {
        (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)}


def test_orders_look_random():
    n, epochs = 50, 2000
    rows = Sampler(n, 7).indices(0, n * epochs).reshape(epochs, n)
    counts = np.stack([np.bincount(rows[:, place], minlength=n) for place in range(n)])
    # Each row is at each place in 1 of 50 epochs: 40 times, with a standard deviation of 6.3.
    assert 40 - 6 * 6.3 < counts.min() and counts.max() < 40 + 6 * 6.3
    neighbours = (np.diff(rows, axis=1) == 1).mean()
    assert 0.015 < neighbours < 0.025  # 1 in 50


def test_any_piece_equals_the_whole():
    sampler = Sampler(37, 5)
    whole = sampler.indices(0, 200)
    for start, count in [(0, 1), (36, 2), (50, 100), (199, 1), (7, 0)]:
        np.testing.assert_array_equal(Sampler(37, 5).indices(start, count), whole[start : start + count])


def test_huge_data_costs_nothing():
    sampler = Sampler(10**12, 1)
    rows = sampler.indices(5 * 10**12 - 500, 1000)  # over the end of an epoch
    assert rows.min() >= 0 and rows.max() < 10**12
    assert len(set(rows[:500].tolist())) == len(set(rows[500:].tolist())) == 500


class Rows:
    """Stands in for a dataset: the batch says which rows it is made of."""

    def rows(self, indices):
        return {"input_ids": indices[:, None].astype(np.int32)}


def stream(sampler, batch_size, world_size, consumed, steps):
    out = []
    for step in range(steps):
        for rank in range(world_size):
            batches = Batches(Rows(), sampler, batch_size, rank, world_size)
            out.extend(batches.at(consumed + step * batch_size)["input_ids"][:, 0].tolist())
    return out


def test_the_global_order_does_not_depend_on_ranks():
    sampler = Sampler(29, 11)
    alone = stream(sampler, 12, 1, 0, 5)
    assert alone == sampler.indices(0, 60).tolist()
    for world_size in (2, 3, 12):
        assert stream(sampler, 12, world_size, 0, 5) == alone


def test_resume_with_another_batch_size_goes_on_at_the_next_sample():
    straight = stream(Sampler(29, 11), 4, 1, 0, 12)
    resumed = stream(Sampler(29, 11), 4, 1, 0, 3) + stream(Sampler(29, 11), 6, 2, 12, 6)
    assert resumed == straight


def test_wrong_sizes():
    sampler = Sampler(29, 11)
    for batch_size, rank, world_size in [(6, 0, 4), (0, 0, 1), (-4, 0, 2), (4, 2, 2), (4, -1, 2)]:
        with pytest.raises(UserError):
            Batches(Rows(), sampler, batch_size, rank, world_size)
    with pytest.raises(UserError, match="n_samples 0"):
        Sampler(0, 1)
