"""Every sample goes where the arithmetic promises, for any number of samples, ranks and batches."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import chain, count, islice, zip_longest

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distribute.sharding import Batch, Split, Taken, Uneven, derive, permutation, windows

totals = st.integers(0, 200)
worlds = st.integers(1, 8)
per_rank = st.integers(1, 16)
policies: st.SearchStrategy[Uneven] = st.sampled_from(["pad", "drop", "balance"])


def splits(world_size: int, global_batch: int, uneven: Uneven) -> list[Split]:
    return [Split(world_size, rank, global_batch, uneven) for rank in range(world_size)]


def of_all(
    world_size: int, batch_size: int, uneven: Uneven, order: list[int]
) -> list[list[Batch[int]]]:
    ranks = splits(world_size, batch_size * world_size, uneven)
    return [list(split.batches(order)) for split in ranks]


def in_turn(ranks: list[list[Batch[int]]]) -> list[int]:
    """The order in which all ranks together read: step by step, rank by rank."""
    steps = zip_longest(*ranks, fillvalue=Batch([], 0, 0, 0.0))
    return [item for step in steps for batch in step for item in batch.items]


def order_of(total: int, shuffle: bool) -> list[int]:
    return permutation(total, seed=3).tolist() if shuffle else list(range(total))


@given(totals, worlds, per_rank, st.booleans())
def test_balance_reads_every_sample_once_in_the_order_of_one_process(
    total: int, world_size: int, batch_size: int, shuffle: bool
) -> None:
    order = order_of(total, shuffle)

    ranks = of_all(world_size, batch_size, "balance", order)

    assert in_turn(ranks) == order


@given(totals, worlds, per_rank, st.booleans())
def test_pad_repeats_fewer_samples_than_ranks_from_the_start(
    total: int, world_size: int, batch_size: int, shuffle: bool
) -> None:
    assume(total > 0)
    order = order_of(total, shuffle)

    read = in_turn(of_all(world_size, batch_size, "pad", order))

    assert read[:total] == order
    assert read[total:] == list(islice(chain.from_iterable([order] * 8), len(read) - total))
    assert len(read) - total == -total % world_size
    if total >= world_size:
        assert max(Counter(read).values()) <= 2


@given(totals, worlds, per_rank, st.booleans())
def test_drop_reads_full_steps_only(
    total: int, world_size: int, batch_size: int, shuffle: bool
) -> None:
    order = order_of(total, shuffle)

    ranks = of_all(world_size, batch_size, "drop", order)

    step = world_size * batch_size
    assert in_turn(ranks) == order[: total - total % step]
    assert all(len(batch.items) == batch_size for batches in ranks for batch in batches)


@given(totals, worlds, per_rank, policies)
def test_all_ranks_take_equally_many_steps(
    total: int, world_size: int, batch_size: int, uneven: Uneven
) -> None:
    ranks = of_all(world_size, batch_size, uneven, order_of(total, False))

    counts = [len(batches) for batches in ranks]
    if uneven == "balance" and total < world_size:
        assert counts == [1] * total + [0] * (world_size - total)
    else:
        assert len(set(counts)) == 1
    assert all(batch.items for batches in ranks for batch in batches)


@given(totals, worlds, st.integers(1, 60), policies)
def test_the_count_is_the_number_of_batches(
    total: int, world_size: int, global_batch: int, uneven: Uneven
) -> None:
    assume(global_batch >= world_size)
    for split in splits(world_size, global_batch, uneven):
        assert split.count(total) == len(list(split.batches(range(total))))


@given(totals, worlds, st.integers(1, 60), policies)
def test_weighted_rank_means_average_to_the_mean_over_the_samples(
    total: int, world_size: int, global_batch: int, uneven: Uneven
) -> None:
    assume(global_batch >= world_size)
    order = [7 * position % 31 for position in range(total)]
    ranks = [list(s.batches(order)) for s in splits(world_size, global_batch, uneven)]

    for step in zip_longest(*ranks, fillvalue=Batch([], 0, 0, 0.0)):
        samples = [item for batch in step for item in batch.items]
        weighted = [
            batch.weight * sum(batch.items) / len(batch.items) for batch in step if batch.items
        ]
        mean = sum(weighted) / world_size
        assert mean == pytest.approx(float(Fraction(sum(samples), len(samples))))


@given(totals, worlds, st.integers(1, 60), policies)
def test_a_global_batch_is_shared_out_by_ceil_and_floor(
    total: int, world_size: int, global_batch: int, uneven: Uneven
) -> None:
    assume(global_batch >= world_size)
    for step in splits(world_size, global_batch, uneven)[0].steps(total):
        split = Split(world_size, 0, global_batch, uneven)
        sizes = [len(split.share(step, rank)) for rank in range(world_size)]
        assert sum(sizes) == len(step)
        assert max(sizes) - min(sizes) <= 1


@given(totals, worlds, per_rank, policies)
def test_no_batch_is_larger_than_asked_for(
    total: int, world_size: int, batch_size: int, uneven: Uneven
) -> None:
    ranks = of_all(world_size, batch_size, uneven, order_of(total, False))

    sizes = [len(batch.items) for batches in ranks for batch in batches]
    # One sample per rank and step can't be shared out evenly by making a batch smaller.
    most = 2 if batch_size == 1 and uneven == "balance" else batch_size
    assert max(sizes, default=0) <= most


@given(totals, worlds, st.integers(1, 60), policies, st.booleans())
def test_an_order_read_as_it_comes_is_shared_out_alike(
    total: int, world_size: int, global_batch: int, uneven: Uneven, shuffle: bool
) -> None:
    assume(global_batch >= world_size)
    order = order_of(total, shuffle)
    for split in splits(world_size, global_batch, uneven):
        assert list(split.batches_of(iter(order))) == list(split.batches(order))
        assert list(split.batches(permutation(total, seed=3))) == list(
            split.batches(order_of(total, True))
        )


@given(worlds, per_rank)
def test_ranks_together_make_the_steps_of_one_process(world_size: int, batch_size: int) -> None:
    step = world_size * batch_size
    order = order_of(5 * step, True)
    alone = [batch.items for batch in Split(1, 0, step, "pad").batches(order)]

    ranks = of_all(world_size, batch_size, "pad", order)

    assert [[i for b in parts for i in b.items] for parts in zip(*ranks, strict=True)] == alone


def test_the_last_two_steps_are_shared_out_together_so_that_no_rank_is_without() -> None:
    ranks = of_all(4, 3, "balance", list(range(12 + 12 + 1)))

    # 13 samples are left for two steps: 7 and 6.
    assert [[len(batch.items) for batch in batches] for batches in ranks] == [
        [3, 2, 2],
        [3, 2, 2],
        [3, 2, 1],
        [3, 1, 1],
    ]
    assert [batches[1].weight for batches in ranks] == [8 / 7, 8 / 7, 8 / 7, 4 / 7]


def test_an_endless_order_is_read_as_far_as_needed() -> None:
    batches = Split(2, 1, 4, "pad").batches_of(count())

    assert [batch.items for batch in islice(batches, 3)] == [[2, 3], [6, 7], [10, 11]]


def test_weights_count_the_samples_of_items_that_are_batches() -> None:
    order = [[0, 1, 2], [3], [4, 5], [6, 7]]
    ranks = [list(split.batches_of(order, len)) for split in splits(2, 2, "pad")]

    assert [[batch.weight for batch in batches] for batches in ranks] == [[1.5, 1.0], [0.5, 1.0]]


@given(totals, st.integers(1, 20))
def test_windows_hold_everything_and_only_the_last_is_of_another_size(
    total: int, size: int
) -> None:
    cut = list(windows(range(total), size))

    assert list(chain.from_iterable(cut)) == list(range(total))
    assert all(len(window) == size for window in cut[:-1])
    if total >= size:
        assert size <= len(cut[-1]) < 2 * size


@given(totals, st.integers(0, 2**256 - 1))
def test_a_permutation_depends_on_its_seed_alone(total: int, seed: int) -> None:
    order = permutation(total, seed).tolist()

    assert sorted(order) == list(range(total))
    assert order == permutation(total, seed).tolist()


# -- resuming ----------------------------------------------------------------------------------


def stops(ranks: list[list[Batch[int]]]) -> list[int]:
    """Where each step ends: what a state that is saved after it holds."""
    return [0, *(batch.stop for batch in ranks[0])]


@given(totals, worlds, per_rank, policies, st.booleans(), st.data())
def test_resumed_alike_the_rest_is_that_of_the_uninterrupted_epoch(
    total: int,
    world_size: int,
    batch_size: int,
    uneven: Uneven,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    order = order_of(total, shuffle)
    ranks = of_all(world_size, batch_size, uneven, order)
    done = data.draw(st.integers(0, len(ranks[0])))
    start = stops(ranks)[done]

    for split, batches in zip(
        splits(world_size, world_size * batch_size, uneven), ranks, strict=True
    ):
        assert list(split.batches(order, start)) == batches[done:]
        assert list(split.batches_of(iter(order), start=start)) == batches[done:]
        assert split.count(total, start) == len(batches[done:])


@given(totals, st.lists(st.tuples(worlds, per_rank), min_size=2, max_size=4), st.data())
def test_resumed_in_any_other_world_every_sample_is_read_once_in_the_same_order(
    total: int, worlds_and_batches: list[tuple[int, int]], data: st.DataObject
) -> None:
    order = order_of(total, True)
    read: list[int] = []
    start = 0
    for turn, (world_size, batch_size) in enumerate(worlds_and_batches):
        split = splits(world_size, world_size * batch_size, "balance")
        ranks = [list(one.batches(order, start)) for one in split]
        counts = [len(batches) for batches in ranks]
        assert counts == [one.count(total, start) for one in split]
        if total - start >= world_size:
            assert len(set(counts)) == 1
        last = turn == len(worlds_and_batches) - 1
        done = counts[0] if last else data.draw(st.integers(0, counts[0]))
        read += in_turn([batches[:done] for batches in ranks])
        start = [start, *(batch.stop for batch in ranks[0])][done]
        assert read == order[:start]

    assert read == order


@given(totals, worlds, per_rank, worlds, per_rank, st.data())
def test_resumed_elsewhere_padding_and_dropping_are_those_of_the_rest(
    total: int, before: int, batch: int, after: int, other: int, data: st.DataObject
) -> None:
    order = order_of(total, True)
    start = data.draw(st.sampled_from(stops(of_all(before, batch, "drop", order))))
    step = after * other

    padded = [list(one.batches(order, start)) for one in splits(after, step, "pad")]
    dropped = [list(one.batches(order, start)) for one in splits(after, step, "drop")]

    left = order[start:]
    assert in_turn(dropped) == left[: len(left) - len(left) % step]
    assert in_turn(padded)[: len(left)] == left
    assert len(in_turn(padded)) - len(left) == -len(left) % after
    assert len({len(batches) for batches in padded}) == 1


@given(totals, worlds, per_rank, policies)
def test_every_batch_of_a_rank_begins_at_a_place_of_its_own(
    total: int, world_size: int, batch_size: int, uneven: Uneven
) -> None:
    ranks = of_all(world_size, batch_size, uneven, order_of(total, False))

    starts = [batch.start for batches in ranks for batch in batches]

    assert len(set(starts)) == len(starts)


def steps_of_streams(
    items: list[int], world_size: int, workers: int, batch_size: int
) -> list[list[tuple[int, list[int]]]]:
    """The steps of streams: for each rank, the worker that made its batch, and the batch.

    A rank's workers give a batch in turn; who has none left is passed over. The ranks stop
    together.
    """
    ranks: list[list[tuple[int, list[int]]]] = []
    for rank in range(world_size):
        shards = [
            iter(items[rank * workers + worker :: world_size * workers])
            for worker in range(workers)
        ]
        turns = [
            [list(islice(shard, batch_size)) for _ in range(len(items) + 1)] for shard in shards
        ]
        ranks.append(
            [
                (worker, turn[worker])
                for turn in zip(*turns, strict=True)
                for worker in range(workers)
                if turn[worker]
            ]
        )
    return [list(step) for step in zip(*ranks, strict=False)]


@given(
    st.integers(0, 60),
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 5)), min_size=2, max_size=4
    ),
    st.data(),
)
def test_what_is_left_of_a_stream_is_what_nobody_has_read(
    total: int, runs: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    items, length = list(range(total)), total
    read: list[int] = []
    for world_size, num_workers, batch_size in runs:
        workers = max(num_workers, 1)
        steps = steps_of_streams(items, world_size, workers, batch_size)
        counts = [0] * (world_size * workers)
        for step in steps[: data.draw(st.integers(0, len(steps)))]:
            for rank, (worker, batch) in enumerate(step):
                counts[rank * workers + worker] += len(batch)
                read += batch
        taken = Taken(tuple(counts))
        items, length = list(taken.rest(items)), taken.left(length)
        assert length == len(items)
        assert items == sorted(items)
        assert sorted(read + items) == list(range(total))


def test_derived_seeds_differ_where_sums_would_not() -> None:
    seeds = {derive("order", seed, epoch) for seed in range(30) for epoch in range(30)}
    seeds |= {derive("worker", seed, epoch) for seed in range(30) for epoch in range(30)}

    assert len(seeds) == 2 * 30 * 30
    # torch's CPU generator looks at the low 32 bits only.
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)
