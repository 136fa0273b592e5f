"""What a rank reads: its share, in the common order, under its own random streams."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from distribute import Context, run
from distribute.data import ShardedLoader, dataloader
from distribute.errors import RequestError
from distribute.transfer import move
from distribute.world import World
from tests.ranks import on_ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def torchs_signal_handler() -> None:
    """torch sets one for SIGCHLD, for good, when a process starts its first loading worker."""
    list(DataLoader([0], num_workers=1))


def world(rank: int = 0, size: int = 1, device: torch.device = CPU) -> World:
    return World(
        rank=rank,
        local_rank=rank,
        node_rank=0,
        world_size=size,
        local_world_size=size,
        num_nodes=1,
        device=device,
        backend="gloo",
        seed=7,
        grouped=size > 1,
    )


def loaders(size: int, data: Any, *, ordinal: int = 0, **options: Any) -> list[ShardedLoader[Any]]:
    """A loader for each rank of a world; map-style data needs no processes."""
    return [dataloader(world(rank, size), data, ordinal=ordinal, **options) for rank in range(size)]


def lists(loader: ShardedLoader[Any]) -> list[list[Any]]:
    return [batch.tolist() for batch in loader]


def flat(batches: list[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def in_turn(ranks: list[list[list[Any]]]) -> list[Any]:
    """What all ranks together read: step by step, rank by rank."""
    return [item for step in zip(*ranks, strict=True) for batch in step for item in batch]


def read(size: int, data: Any, **options: Any) -> list[Any]:
    return in_turn([lists(loader) for loader in loaders(size, data, **options)])


def rng_states() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), (name, keys.tolist(), *rest)]


class Drawing(Dataset[torch.Tensor]):
    """Its items are draws from the three global generators, and the worker that drew."""

    def __init__(self, total: int = 8) -> None:
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, position: int) -> torch.Tensor:
        info = get_worker_info()
        worker = -1 if info is None else info.id
        draws = [float(torch.rand(())), random.random(), float(np.random.rand()), worker]
        return torch.tensor(draws, dtype=torch.float64)


def draws(loader: ShardedLoader[Any]) -> list[list[float]]:
    return [row for batch in loader for row in batch.tolist()]


# -- order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_together_read_the_order_of_one_process(size: int, shuffle: bool) -> None:
    data = torch.arange(24)

    alone = lists(dataloader(world(), data, ordinal=0, global_batch_size=12, shuffle=shuffle))

    assert read(size, data, global_batch_size=12, shuffle=shuffle) == flat(alone)
    assert read(size, data, batch_size=12 // size, shuffle=shuffle) == flat(alone)
    assert read(size, data, batch_size=1, shuffle=shuffle) == flat(alone)
    assert sorted(flat(alone)) == list(range(24))
    assert (flat(alone) != list(range(24))) == shuffle


def test_a_batch_size_may_be_a_number_of_numpy() -> None:
    size: Any = np.int64(2)

    assert lists(dataloader(world(), torch.arange(4), ordinal=0, batch_size=size)) == [
        [0, 1],
        [2, 3],
    ]
    assert len(dataloader(world(0, 2), torch.arange(4), ordinal=0, global_batch_size=size)) == 2


def test_without_a_batch_size_a_batch_is_one_sample() -> None:
    assert lists(dataloader(world(), torch.arange(3), ordinal=0)) == [[0], [1], [2]]


def test_each_epoch_has_an_order_of_its_own_that_can_be_asked_for() -> None:
    loader = dataloader(world(), torch.arange(20), ordinal=0, batch_size=20, shuffle=True)
    assert loader.epoch == 0

    first, second = lists(loader), lists(loader)
    assert loader.epoch == 1
    loader.set_epoch(0)

    assert loader.epoch == 0
    assert lists(loader) == first != second
    assert lists(loader) == second


def test_an_epoch_begins_with_iter_not_with_the_first_batch() -> None:
    loader = dataloader(world(), torch.arange(20), ordinal=0, batch_size=20, shuffle=True)
    first, second = iter(loader), iter(loader)

    assert next(second).tolist() != next(first).tolist()
    loader.set_epoch(0)
    assert (
        next(iter(loader)).tolist()
        == next(
            iter(dataloader(world(), torch.arange(20), ordinal=0, batch_size=20, shuffle=True))
        ).tolist()
    )


def test_the_order_depends_on_the_seed_and_the_loader() -> None:
    data = torch.arange(50)
    orders = [
        tuple(read(2, data, batch_size=5, shuffle=True, ordinal=ordinal, seed=seed))
        for ordinal in (0, 1)
        for seed in (0, 1, None)
    ]

    assert len(set(orders)) == 6
    assert read(2, data, batch_size=5, shuffle=True, seed=7) == list(orders[2])  # the world's


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
        ({"uneven": "pad"}, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        ({"uneven": "drop"}, [[[0, 1]], [[2, 3]]]),
        ({"drop_last": True}, [[[0, 1]], [[2, 3]]]),
        ({"drop_last": True, "uneven": "drop"}, [[[0, 1]], [[2, 3]]]),
    ],
)
def test_the_tail(options: dict[str, Any], shares: list[Any]) -> None:
    made = loaders(2, torch.arange(7), batch_size=2, **options)

    assert [lists(loader) for loader in made] == shares
    assert [len(loader) for loader in made] == [len(share) for share in shares]


def test_shuffling_and_samplers_pad_by_default() -> None:
    assert len(read(2, torch.arange(7), batch_size=2, shuffle=True)) == 8
    assert len(read(2, torch.arange(7), batch_size=2, sampler=range(7))) == 8
    sequential = SequentialSampler(range(7))
    assert len(read(2, torch.arange(7), batch_size=2, sampler=sequential)) == 8
    assert len(read(2, torch.arange(7), batch_size=2, sampler=None)) == 7


def test_a_global_batch_that_does_not_divide_is_shared_out_with_its_weights() -> None:
    made = loaders(2, torch.arange(10), global_batch_size=5)

    assert [loader.batch_size for loader in made] == [3, 2]
    assert [lists(loader) for loader in made] == [[[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9]]]
    assert [loader.weight for loader in made] == [1.2, 0.8]


@pytest.mark.parametrize("total", [0, 1, 2])
def test_fewer_samples_than_ranks(total: int) -> None:
    made = loaders(3, torch.arange(total), batch_size=2)

    assert [lists(loader) for loader in made] == [
        [[rank]] if rank < total else [] for rank in range(3)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_weight_is_that_of_the_batch_in_hand(workers: int) -> None:
    made = loaders(2, torch.arange(7.0), batch_size=2, num_workers=workers)

    pairs = [[(batch.tolist(), loader.weight) for batch in loader] for loader in made]

    assert pairs == [[([0, 1], 1.0), ([4, 5], 4 / 3)], [([2, 3], 1.0), ([6], 2 / 3)]]
    assert [loader.weight for loader in made] == [4 / 3, 2 / 3]
    next(iter(made[0]))  # the rest of it may have been fetched ahead
    assert [(batch.tolist(), made[0].weight) for batch in made[0]] == pairs[0]


def test_attributes() -> None:
    data = [1, 2, 3]
    loader = dataloader(world(), data, ordinal=0, batch_size=2)

    assert loader.dataset is data
    assert loader.batch_size == 2
    assert loader.weight == 1.0
    assert isinstance(loader.loader, DataLoader)


def test_a_dataset_that_grows_is_read_whole() -> None:
    data = [torch.tensor(0)]
    loader = dataloader(world(), data, ordinal=0, shuffle=True)
    assert lists(loader) == [[0]]

    data.append(torch.tensor(1))

    assert sorted(lists(loader)) == [[0], [1]]
    assert len(loader) == 2


def test_the_callback_runs_once_before_anything_is_drawn() -> None:
    events: list[str] = []

    class Noting(Drawing):
        def __getitem__(self, position: int) -> torch.Tensor:
            events.append("read")
            return super().__getitem__(position)

    loader = dataloader(
        world(), Noting(2), ordinal=0, on_first_batch=lambda: events.append("first")
    )
    assert events == []

    list(loader)
    list(loader)

    assert events == ["first", *["read"] * 4]


# -- torch's own options -----------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_the_same_order_in_every_epoch(persistent: bool) -> None:
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True}
    plain = loaders(2, torch.arange(11), **options)
    many = loaders(2, torch.arange(11), **options, num_workers=2, persistent_workers=persistent)

    for _ in range(3):
        assert [lists(loader) for loader in many] == [lists(loader) for loader in plain]
    many[0].set_epoch(0)
    plain[0].set_epoch(0)
    assert lists(many[0]) == lists(plain[0])


def test_options_of_torch_reach_it() -> None:
    started: list[int] = []
    loader = dataloader(
        world(),
        torch.arange(4),
        ordinal=0,
        batch_size=2,
        num_workers=1,
        prefetch_factor=3,
        collate_fn=lambda samples: (len(samples), torch.stack(samples)),
        worker_init_fn=lambda worker: started.append(worker) or exit_unless(worker == 0),
    )

    assert [count for count, _ in loader] == [2, 2]
    assert loader.loader.prefetch_factor == 3


def exit_unless(fine: bool) -> None:
    if not fine:
        raise SystemExit(1)


def test_a_worker_init_fn_runs_in_the_worker_and_sees_the_dataset() -> None:
    class Told(Dataset[torch.Tensor]):
        told = -1

        def __len__(self) -> int:
            return 4

        def __getitem__(self, position: int) -> torch.Tensor:
            return torch.tensor(self.told)

    def tell(worker: int) -> None:
        get_worker_info().dataset.told = worker + 10  # type: ignore[union-attr, attr-defined]

    loader = dataloader(world(), Told(), ordinal=0, num_workers=2, worker_init_fn=tell)

    assert sorted(flat(lists(loader))) == [10, 10, 11, 11]


def test_an_unknown_option_is_refused_by_torch() -> None:
    with pytest.raises(TypeError, match="num_wrokers"):
        dataloader(world(), torch.arange(4), ordinal=0, num_wrokers=2)


def test_weights_are_not_claimed_where_batches_come_out_of_order() -> None:
    loader = dataloader(world(), torch.arange(4), ordinal=0, num_workers=2, in_order=False)

    with pytest.raises(RuntimeError, match="in_order"):
        _ = loader.weight


def test_memory_is_pinned_for_an_accelerator_only() -> None:
    data = torch.arange(4)
    cuda = world(device=torch.device("cuda", 0))

    assert dataloader(cuda, data, ordinal=0).loader.pin_memory
    assert not dataloader(cuda, data, ordinal=0, pin_memory=False).loader.pin_memory
    assert not dataloader(cuda, data, ordinal=0, to_device=False).loader.pin_memory
    assert not dataloader(world(), data, ordinal=0, pin_memory=True).loader.pin_memory


# -- an existing DataLoader, samplers ----------------------------------------------------------


def double(samples: list[torch.Tensor]) -> torch.Tensor:
    return 2 * torch.stack(samples)


class OwnLoader(DataLoader[Any]):
    pass


def test_an_existing_loader_keeps_its_settings() -> None:
    data = torch.arange(10)
    given = OwnLoader(data, batch_size=2, collate_fn=double, num_workers=2, timeout=60)  # type: ignore[arg-type]

    made = loaders(2, given)

    assert in_turn([lists(loader) for loader in made]) == [2 * n for n in range(10)]
    assert [loader.batch_size for loader in made] == [2, 2]
    assert type(made[0].loader) is OwnLoader
    assert made[0].loader.timeout == 60
    assert made[0].dataset is data
    assert [batch.tolist() for batch in given] == [[4 * n, 4 * n + 2] for n in range(5)]


def noted(worker: int) -> None:
    torch.set_num_threads(1 + worker)


@pytest.mark.parametrize(
    "settings",
    [
        {"collate_fn": double, "drop_last": True},
        {
            "num_workers": 2,
            "prefetch_factor": 3,
            "persistent_workers": True,
            "timeout": 60,
            "worker_init_fn": noted,
            "multiprocessing_context": "fork",
            "in_order": True,
        },
        {"num_workers": 1, "multiprocessing_context": "forkserver", "persistent_workers": False},
        {"shuffle": True, "generator": torch.Generator()},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_setting_of_an_existing_loader_is_that_of_the_one_underneath(
    settings: dict[str, Any],
) -> None:
    given = DataLoader(torch.arange(12), batch_size=3, **settings)  # type: ignore[arg-type]
    before = dict(vars(given))

    made = dataloader(world(), given, ordinal=0)

    ours = {"batch_sampler", "worker_init_fn"}  # which call the user's
    for name, value in before.items():
        if name not in ours:
            assert vars(made.loader)[name] is value, name
    assert vars(given) == before
    if settings.get("multiprocessing_context") != "forkserver":  # which takes seconds to start
        assert sum(len(batch) for batch in made) == 12


def test_the_workers_of_an_existing_loader_stay_its_own() -> None:
    data = torch.arange(8)
    given = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    iterator = iter(given)

    assert read(2, given) == list(range(8))
    assert [batch.tolist() for batch in iterator] == [[2 * n, 2 * n + 1] for n in range(4)]


def test_a_shuffling_loader_stays_shuffled_and_draws_alike_on_all_ranks() -> None:
    def of_rank(rank: int, size: int) -> list[list[list[int]]]:
        torch.manual_seed(rank)  # as ranks are after the first batch
        given = DataLoader(torch.arange(12), batch_size=6 // size, shuffle=True)  # type: ignore[arg-type]
        loader = dataloader(world(rank, size), given, ordinal=0)
        return [lists(loader), lists(loader)]

    alone, ranks = of_rank(0, 1), [of_rank(rank, 2) for rank in range(2)]

    for epoch in range(2):
        both = in_turn([ranks[0][epoch], ranks[1][epoch]])
        assert both == flat(alone[epoch])
        assert sorted(both) == list(range(12)) != both
    assert alone[0] != alone[1]


def test_drop_last_of_an_existing_loader_holds() -> None:
    given = DataLoader(torch.arange(7), batch_size=2, drop_last=True)  # type: ignore[arg-type]

    assert read(2, given) == [0, 1, 2, 3]


@pytest.mark.parametrize("as_option", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_distributed_sampler_is_not_sharded_twice(as_option: bool, shuffle: bool) -> None:
    data = torch.arange(12)
    ranks = []
    for rank in range(2):
        sampler = DistributedSampler(data, 2, rank, shuffle=shuffle, seed=3)  # type: ignore[arg-type, var-annotated]
        if as_option:
            loader = dataloader(world(rank, 2), data, ordinal=0, sampler=sampler, batch_size=2)
        else:
            given = DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
            loader = dataloader(world(rank, 2), given, ordinal=0)
        assert len(loader) == 3
        ranks.append(lists(loader))

    assert in_turn(ranks) == read(2, data, batch_size=2, shuffle=shuffle, seed=3)
    assert sorted(in_turn(ranks)) == list(range(12))


def test_the_seed_of_a_distributed_sampler_is_that_of_the_order_only() -> None:
    def made(seed: int) -> list[list[float]]:
        sampler = DistributedSampler(range(8), 1, 0, seed=0)  # type: ignore[arg-type, var-annotated]
        here = dataclasses.replace(world(), seed=seed)
        return draws(dataloader(here, Drawing(), ordinal=0, sampler=sampler))

    assert made(1) != made(2)


def test_a_distributed_sampler_gives_its_drop_last() -> None:
    data = torch.arange(7)
    sampler = DistributedSampler(data, 2, 0, shuffle=False, drop_last=True)  # type: ignore[arg-type, var-annotated]

    assert read(2, data, batch_size=2, sampler=sampler) == [0, 1, 2, 3]


def test_the_epoch_that_a_loop_sets_on_its_sampler_counts() -> None:
    data = torch.arange(20)
    sampler = DistributedSampler(data, 1, 0, seed=7)  # type: ignore[arg-type, var-annotated]
    loader = dataloader(world(), data, ordinal=0, sampler=sampler, batch_size=20)
    plain = dataloader(world(), data, ordinal=0, shuffle=True, batch_size=20)
    expected = [lists(plain) for _ in range(7)]

    for epoch in (0, 1, 5, 6):  # resumes at epoch 5
        loader.sampler.set_epoch(epoch)
        assert lists(loader) == expected[epoch]
        assert loader.epoch == epoch
    loader.set_epoch(2)
    assert lists(loader) == expected[2]
    assert lists(loader) == expected[3]


def test_a_weighted_sampler_is_drawn_alike_and_sharded() -> None:
    weights = [1.0] * 10 + [0.0] * 10

    def of_rank(rank: int, size: int) -> list[list[int]]:
        torch.manual_seed(rank)
        sampler = WeightedRandomSampler(weights, 16)
        loader = dataloader(
            world(rank, size), torch.arange(20), ordinal=0, global_batch_size=8, sampler=sampler
        )
        assert len(loader) == 2
        return lists(loader)

    together = in_turn([of_rank(0, 2), of_rank(1, 2)])

    assert together == flat(of_rank(0, 1))
    assert len(together) == 16
    assert set(together) <= set(range(10))


class Unsized(Sampler[int]):
    """Endless, and draws from all three generators."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(4, ())) + 4 * random.randrange(4) + 16 * np.random.randint(4)


def test_an_endless_sampler_is_sharded_as_it_goes() -> None:
    made = loaders(2, torch.arange(64), sampler=Unsized(), batch_size=3)
    alone = dataloader(world(), torch.arange(64), ordinal=0, sampler=Unsized(), batch_size=6)

    taken = [[batch.tolist() for batch in itertools.islice(loader, 4)] for loader in made]

    assert in_turn(taken) == [n for batch in itertools.islice(alone, 4) for n in batch.tolist()]
    with pytest.raises(TypeError):
        len(made[0])


def test_the_generator_of_a_shuffling_loader_draws_as_in_torch() -> None:
    data = torch.arange(20)

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    torchs = DataLoader(data, batch_size=4, shuffle=True, generator=generator())  # type: ignore[arg-type]
    given = DataLoader(data, batch_size=4, shuffle=True, generator=generator())  # type: ignore[arg-type]
    kept = dataloader(world(), given, ordinal=0)
    made = dataloader(world(), data, ordinal=0, batch_size=4, shuffle=True, generator=generator())

    for _ in range(2):
        expected = [batch.tolist() for batch in torchs]
        assert lists(kept) == expected
        assert lists(made) == expected


class SelfDividing(Sampler[int]):
    def __init__(self, num_replicas: int, rank: int) -> None:
        self.num_replicas, self.rank = num_replicas, rank

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(8).tolist()  # as ranks draw alike, so do these
        return iter(order[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return 8 // self.num_replicas


def test_a_sampler_that_divides_the_samples_itself_is_left_to_it() -> None:
    ranks = []
    for rank in range(2):
        torch.manual_seed(rank)
        sampler = SelfDividing(2, rank)
        loader = dataloader(world(rank, 2), torch.arange(8), ordinal=0, sampler=sampler)
        assert len(loader) == 4
        ranks.append(lists(loader))

    assert sorted(in_turn(ranks)) == list(range(8))
    with pytest.raises(RequestError, match="rank 0 of 2"):
        dataloader(world(1, 2), torch.arange(8), ordinal=0, sampler=SelfDividing(2, 0))
    with pytest.raises(RequestError, match="divides"):
        dataloader(
            world(0, 2), torch.arange(8), ordinal=0, sampler=SelfDividing(2, 0), uneven="pad"
        )


class OwnBatches(BatchSampler):
    """Batches of whatever sampler it is given, as people write them to group by length."""


def test_a_batch_sampler_over_a_sampler_that_divides_is_not_shared_out_again() -> None:
    ranks = []
    for rank in range(2):
        sampler = DistributedSampler(torch.arange(8), 2, rank, shuffle=False)  # type: ignore[arg-type, var-annotated]
        given = DataLoader(torch.arange(8), batch_sampler=OwnBatches(sampler, 2, False))  # type: ignore[arg-type]
        ranks.append(lists(dataloader(world(rank, 2), given, ordinal=0)))

    assert ranks == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_loader_is_not_shared_out_twice(stream: bool) -> None:
    data = Counting(8) if stream else torch.arange(8)
    loader = dataloader(world(0, 2), data, ordinal=0, batch_size=2)

    for again in (loader, loader.loader):
        with pytest.raises(RequestError, match="shared out among the ranks already"):
            dataloader(world(0, 2), again, ordinal=1)


# -- batch samplers ----------------------------------------------------------------------------


class Buckets(Sampler[list[int]]):
    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class ShuffledBuckets(Buckets):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))


FIVE = [[0, 1, 2], [3], [4, 5], [6, 7], [8]]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    ("uneven", "shares"),
    [
        (None, [[[0, 1, 2], [4, 5], [8]], [[3], [6, 7], [0, 1, 2]]]),
        ("pad", [[[0, 1, 2], [4, 5], [8]], [[3], [6, 7], [0, 1, 2]]]),
        ("drop", [[[0, 1, 2], [4, 5]], [[3], [6, 7]]]),
        ("balance", [[[0, 1, 2], [4, 5, 6, 7]], [[3], [8]]]),
    ],
)
def test_the_batches_of_a_batch_sampler_are_dealt_out(
    existing: bool, uneven: Any, shares: list[Any]
) -> None:
    if existing:
        given = DataLoader(torch.arange(9), batch_sampler=Buckets(FIVE))  # type: ignore[arg-type]
        made = loaders(2, given, uneven=uneven)
    else:
        made = loaders(2, torch.arange(9), batch_sampler=Buckets(FIVE), uneven=uneven)

    pairs = [[(batch.tolist(), loader.weight) for batch in loader] for loader in made]

    assert [[batch for batch, _ in rank] for rank in pairs] == shares
    assert [len(loader) for loader in made] == [len(share) for share in shares]
    for (left, left_weight), (right, right_weight) in zip(*pairs, strict=True):
        half = (len(left) + len(right)) / 2
        assert (left_weight, right_weight) == (len(left) / half, len(right) / half)


def test_torchs_own_batch_sampler_deals_out_its_samples() -> None:
    batches = BatchSampler(SequentialSampler(range(7)), 2, drop_last=False)

    assert read(2, torch.arange(7), batch_sampler=batches) == [*range(7), 0]
    assert read(2, torch.arange(7), batch_sampler=batches, uneven="balance") == [*range(7)]
    assert loaders(2, torch.arange(7), batch_sampler=Buckets(FIVE))[0].batch_size is None


def test_a_loader_that_does_not_batch_deals_out_its_items() -> None:
    data = torch.arange(10).view(5, 2)
    bulk = BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)

    made = loaders(2, DataLoader(data, batch_size=None), uneven="pad")  # type: ignore[arg-type]
    assert [lists(loader) for loader in made] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]
    assert read(2, DataLoader(torch.arange(10), batch_size=None, sampler=bulk)) == [  # type: ignore[arg-type]
        *range(10),
        *range(4),
    ]
    with pytest.raises(RequestError, match="batch_size=None"):
        dataloader(world(), DataLoader(data, batch_size=None), ordinal=0)  # type: ignore[arg-type]


def test_a_batch_sampler_hears_of_the_epochs() -> None:
    heard: list[int] = []

    class Hearing(Buckets):
        def set_epoch(self, epoch: int) -> None:
            heard.append(epoch)

    loader = dataloader(world(), torch.arange(9), ordinal=0, batch_sampler=Hearing(FIVE))
    list(loader)
    loader.set_epoch(4)
    list(loader)

    assert heard == [0, 4]


# -- random streams ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"sampler": WeightedRandomSampler([1.0] * 8, 8)},
        {"batch_sampler": BatchSampler(RandomSampler(range(8)), 2, drop_last=False)},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_loading_never_disturbs_the_streams_outside(options: dict[str, Any]) -> None:
    loader = dataloader(world(), Drawing(), ordinal=0, **options)
    np.random.randn()  # numpy draws these in pairs: the second one is still to come
    before = rng_states()

    for _ in range(2):
        for _ in loader:
            assert rng_states() == before

    assert rng_states() == before


def test_streams_outside_are_back_even_after_an_error() -> None:
    class Failing(Drawing):
        def __getitem__(self, position: int) -> torch.Tensor:
            super().__getitem__(position)
            raise LookupError

    before = rng_states()
    with pytest.raises(LookupError):
        list(dataloader(world(), Failing(), ordinal=0))

    assert rng_states() == before


def test_what_the_loop_draws_does_not_change_what_the_dataset_draws() -> None:
    plain = draws(dataloader(world(), Drawing(), ordinal=0, batch_size=2))
    loader = dataloader(world(), Drawing(), ordinal=0, batch_size=2)
    torch.manual_seed(0)

    disturbed = []
    for batch in loader:
        disturbed += batch.tolist()
        torch.rand(3), random.random(), np.random.rand()

    assert disturbed == plain


@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "multiprocessing_context": "fork", "generator": torch.Generator()},
    ],
    ids=["none", "two", "persistent", "generator"],
)
def test_streams_differ_by_rank_worker_and_epoch(workers: dict[str, Any]) -> None:
    made = loaders(2, Drawing(16), batch_size=2, **workers)

    rows = [row for _ in range(3) for loader in made for row in draws(loader)]

    assert len(rows) == 3 * 16
    for column in range(3):
        assert len({row[column] for row in rows}) == len(rows)
    assert {row[3] for row in rows} == ({0.0, 1.0} if workers else {-1.0})


def test_streams_are_reproducible_in_every_epoch_also_of_workers_that_persist() -> None:
    def made(**options: Any) -> ShardedLoader[Any]:
        return dataloader(
            world(1, 2), Drawing(16), ordinal=0, batch_size=2, num_workers=2, **options
        )

    fresh, persistent = made(), made(persistent_workers=True)
    epochs = [draws(fresh) for _ in range(3)]

    assert [draws(persistent) for _ in range(3)] == epochs
    for epoch in (1, 1, 0):  # the same one twice, too
        persistent.set_epoch(epoch)
        assert draws(persistent) == epochs[epoch]
    resumed = made(persistent_workers=True)
    resumed.set_epoch(2)
    assert draws(resumed) == epochs[2]


def test_the_seed_sets_the_streams() -> None:
    def made(**options: Any) -> list[list[float]]:
        return draws(dataloader(world(), Drawing(), ordinal=0, num_workers=1, **options))

    assert made(seed=1) == made(seed=1) != made(seed=2)
    generators = [torch.Generator().manual_seed(n) for n in (1, 1, 2)]
    first, same, other = [made(generator=generator) for generator in generators]
    assert first == same != other


# -- devices -----------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str
    cached: torch.Tensor = field(default_factory=lambda: torch.ones(1), init=False)


def nested() -> dict[str, Any]:
    x = torch.ones(2)
    return OrderedDict(
        plain=x,
        pair=Pair(x, [x, "text"]),
        sample=Sample(x, "a"),
        words=["a", None, 3, x],
        packed=pack_sequence([x]),
        none=None,
    )


def test_batches_arrive_on_the_device_whatever_they_are_made_of() -> None:
    meta = world(device=torch.device("meta"))

    (batch,) = dataloader(meta, [nested()], ordinal=0, collate_fn=lambda samples: samples[0])

    assert type(batch) is OrderedDict
    pair, sample = batch["pair"], batch["sample"]
    assert type(pair) is Pair
    assert type(sample) is Sample
    moved = [batch["plain"], pair.x, pair.y[0], sample.x, sample.cached, batch["words"][3]]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert (pair.y[1], sample.name, batch["words"][:3]) == ("text", "a", ["a", None, 3])
    assert isinstance(batch["packed"], PackedSequence)
    assert batch["packed"].data.device.type == "meta"
    assert batch["packed"].batch_sizes.device.type == "cpu"


def test_moving_leaves_the_original_as_it_was() -> None:
    original = nested()

    move(original, torch.device("meta"))

    assert original["words"][3].device.type == "cpu"
    assert original["sample"].x.device.type == "cpu"


def test_anything_with_to_is_moved() -> None:
    class Graph:
        def to(self, device: torch.device) -> str:
            return f"on {device}"

    assert move([Graph()], torch.device("meta")) == ["on meta"]
    assert move(Graph, torch.device("meta")) is Graph


def test_batches_stay_where_they_are_if_asked() -> None:
    meta = world(device=torch.device("meta"))

    (batch,) = dataloader(meta, [torch.ones(1)], ordinal=0, to_device=False)

    assert batch.device.type == "cpu"


# -- streams -----------------------------------------------------------------------------------


class Counting(IterableDataset[int]):
    def __init__(self, total: int) -> None:
        self.total = total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.total))


class Sized(Counting):
    def __len__(self) -> int:
        return self.total


class Textbook(Counting):
    """Divides itself among the workers, as torch's documentation teaches."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, self.total, step)


class Shuffling(Counting):
    """Draws from all three generators before each item."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.total))
        while order:
            draws = random.random() + float(torch.rand(())) + np.random.rand()
            yield order.pop(int(draws * 1000) % len(order))


class Eager(Counting):
    """Draws when it is asked for its iterator already."""

    def __iter__(self) -> Iterator[int]:
        return iter([random.randrange(10) + np.random.randint(10) + int(torch.randint(10, ()))])


def masking(samples: list[int]) -> torch.Tensor:
    """Draws once for a batch, which a rank does not do at the same item as another rank."""
    torch.rand(()), random.random(), np.random.rand()
    return torch.tensor(samples)


def test_a_stream_alone_is_read_whole_and_in_order() -> None:
    loader = dataloader(world(), Counting(7), ordinal=0, batch_size=2)

    assert lists(loader) == [[0, 1], [2, 3], [4, 5], [6]]
    assert loader.weight == 1.0
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize("dataset", [Counting(24), Textbook(24), Shuffling(24)])
@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["none", "two", "persistent"],
)
def test_every_item_of_a_stream_goes_to_one_rank_and_worker(
    dataset: IterableDataset[int], workers: dict[str, Any]
) -> None:
    def of_rank(here: World) -> list[list[int]]:
        torch.manual_seed(here.rank)
        random.seed(here.rank)
        options: dict[str, Any] = {"batch_size": 2, "collate_fn": masking} | workers
        loader = dataloader(here, dataset, ordinal=0, **options)
        before = rng_states()
        epochs = [flat(lists(loader)) for _ in range(2)]
        assert rng_states() == before
        return epochs

    left, right = on_ranks(2, of_rank)

    for epoch in range(2):
        assert Counter(left[epoch] + right[epoch]) == Counter(range(24))
    assert (left[0] != left[1]) == isinstance(dataset, Shuffling)


def test_ranks_stop_together_and_weigh_what_they_have() -> None:
    def of_rank(here: World) -> list[Any]:
        loader = dataloader(
            here, Counting(7 * (1 + here.rank)), ordinal=0, batch_size=2, sharded=True
        )
        return [[(batch.tolist(), loader.weight) for batch in loader] for _ in range(2)]

    left, right = on_ranks(2, of_rank)

    steps = [[0, 1], [2, 3], [4, 5]]
    for epoch in range(2):
        assert left[epoch] == [*((s, 1.0) for s in steps), ([6], 2 / 3)]
        assert right[epoch] == [*((s, 1.0) for s in steps), ([6, 7], 4 / 3)]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_stream_never_disturbs_the_streams_outside(sharded: bool) -> None:
    loader = dataloader(world(), Eager(1), ordinal=0, sharded=sharded)
    before = rng_states()

    first, second = lists(loader), lists(loader)

    assert rng_states() == before
    assert first != second
    loader.set_epoch(0)
    assert lists(loader) == first


@pytest.mark.parametrize("uneven", [None, "drop"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("total", [13, 9, 3, 0])
def test_the_length_of_a_sized_stream_is_its_number_of_steps(
    total: int, workers: int, uneven: Any
) -> None:
    def of_rank(here: World) -> tuple[int, int]:
        loader = dataloader(
            here,
            Sized(total),
            ordinal=0,
            global_batch_size=5,
            num_workers=workers,
            uneven=uneven,
        )
        return len(loader), len(list(loader))

    left, right = on_ranks(2, of_rank)

    assert left[0] == left[1] == right[0] == right[1]


def test_a_stream_that_shards_itself_is_left_to_it() -> None:
    loader = dataloader(world(), Textbook(6), ordinal=0, batch_size=3, sharded=True, num_workers=2)

    assert lists(loader) == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(TypeError, match="shards itself"):
        len(loader)


def test_an_existing_loader_of_a_stream() -> None:
    batched = DataLoader(Counting(5), batch_size=2, drop_last=True)
    single = DataLoader(Counting(3), batch_size=None)

    assert lists(dataloader(world(), batched, ordinal=0)) == [[0, 1], [2, 3]]
    assert list(dataloader(world(), single, ordinal=0)) == [0, 1, 2]
    assert list(single) == [0, 1, 2]


# -- bringing values together ------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": True, "uneven": "balance"},
        {"shuffle": False},
        {"uneven": "pad"},
        {"shuffle": True, "num_workers": 2},
    ],
)
def test_values_come_back_in_the_order_of_the_dataset(size: int, options: dict[str, Any]) -> None:
    data = torch.arange(20) ** 2

    def of_rank(ctx: Context) -> tuple[Any, Any, Any]:
        loader = ctx.dataloader(data, batch_size=3, **options)
        for _ in range(2):  # each epoch has an order of its own
            read = torch.cat(list(loader))
            values = torch.stack([read, -read], 1)
            gathered = ctx.gather_samples(values, loader)
        words = ctx.gather_samples([str(one) for one in read.tolist()], loader)
        return ctx.world_size, gathered, words

    method = {} if size == 1 else {"start_method": "fork", "timeout": 120}
    ranks = run(of_rank, devices=size, returns="all", **method)

    assert len(ranks) == size
    for world_size, gathered, words in ranks:
        assert world_size == size
        assert gathered.tolist() == [[n * n, -n * n] for n in range(20)]
        assert words == [str(n * n) for n in range(20)]


def test_values_of_what_was_dropped_or_not_read_are_left_out() -> None:
    made = loaders(2, torch.arange(11), batch_size=2, drop_last=True)
    assert made[0].in_dataset_order([flat(lists(loader)) for loader in made]) == list(range(8))

    made = loaders(2, torch.arange(11), batch_size=2)
    begun = [[next(iter(loader)).tolist()] for loader in made]
    assert made[0].in_dataset_order([flat(batches) for batches in begun]) == [0, 1, 2, 3]

    sampled = loaders(2, torch.arange(11), batch_size=2, sampler=[5, 5, 9, 1, 0])
    values = [flat(lists(loader)) for loader in sampled]
    assert sampled[0].in_dataset_order(values) == [5, 5, 9, 1, 0]


def test_values_without_an_order_are_refused() -> None:
    loader = dataloader(world(), torch.arange(4), ordinal=0)
    list(loader)
    with pytest.raises(RequestError, match="3 values on rank 0"):
        loader.in_dataset_order([[1, 2, 3]])
    buckets = dataloader(world(), torch.arange(9), ordinal=0, batch_sampler=Buckets(FIVE))
    list(buckets)
    with pytest.raises(RequestError, match="batch sampler"):
        buckets.in_dataset_order([list(range(9))])
    stream = dataloader(world(), Counting(2), ordinal=0)
    list(stream)
    with pytest.raises(RequestError, match="stream"):
        stream.in_dataset_order([[0, 1]])


# -- refusals ----------------------------------------------------------------------------------

FOUR = torch.arange(4)
STREAM = Counting(4)


def loader_of_four() -> DataLoader[Any]:
    return DataLoader(FOUR, batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (FOUR, {"batch_size": 0}, "batch_size=0"),
        (FOUR, {"batch_size": -1}, "batch_size=-1"),
        (FOUR, {"batch_size": 1.5}, r"batch_size=1\.5"),
        (FOUR, {"batch_size": True}, "batch_size=True"),
        (FOUR, {"global_batch_size": 0}, "global_batch_size=0"),
        (FOUR, {"global_batch_size": 1}, "global_batch_size=1: each of 2 ranks"),
        (FOUR, {"batch_size": 2, "global_batch_size": 4}, "pass one"),
        (FOUR, {"shuffle": True, "sampler": [0]}, "shuffle"),
        (FOUR, {"shuffle": True, "seed": 1, "generator": torch.Generator()}, "generator"),
        (FOUR, {"uneven": "ceil"}, "'pad', 'drop', 'balance'"),
        (FOUR, {"uneven": "pad", "drop_last": True}, "drop_last"),
        (FOUR, {"batch_sampler": [[0]], "batch_size": 2}, "leave out batch_size"),
        (FOUR, {"batch_sampler": [[0]], "batch_size": 1}, "leave out batch_size"),
        (FOUR, {"batch_sampler": [[0]], "global_batch_size": 2}, "leave out global_batch_size"),
        (FOUR, {"batch_sampler": [[0]], "shuffle": True}, "leave out shuffle"),
        (FOUR, {"batch_sampler": [[0]], "sampler": [0]}, "leave out sampler"),
        (FOUR, {"batch_sampler": [[0]], "drop_last": True}, "leave out drop_last"),
        (FOUR, {"sharded": True}, "sharded"),
        (iter([1]), {}, "IterableDataset"),
        (STREAM, {"shuffle": True}, "shuffle"),
        (STREAM, {"sampler": []}, "sampler"),
        (STREAM, {"batch_sampler": []}, "batch_sampler"),
        (STREAM, {"uneven": "pad"}, "uneven='pad'"),
        (STREAM, {"uneven": "balance"}, "uneven='balance'"),
        (loader_of_four(), {"batch_size": 2}, "batch_size=2 with a DataLoader"),
        (loader_of_four(), {"global_batch_size": 2}, "global_batch_size=2 with a DataLoader"),
        (loader_of_four(), {"shuffle": True}, "shuffle=True with a DataLoader"),
        (loader_of_four(), {"drop_last": True}, "drop_last=True with a DataLoader"),
        (loader_of_four(), {"num_workers": 0}, "num_workers=0 with a DataLoader"),
    ],
)
def test_what_can_not_be_done_is_refused(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        dataloader(world(0, 2), data, ordinal=0, **options)


def test_a_dataset_without_a_length_needs_a_sampler() -> None:
    class Lengthless(Dataset[int]):
        def __getitem__(self, position: int) -> int:
            return position

    with pytest.raises(RequestError, match="length"):
        dataloader(world(), Lengthless(), ordinal=0)
    assert lists(dataloader(world(), Lengthless(), ordinal=0, sampler=[5, 6])) == [[5], [6]]


def test_an_option_left_at_its_default_may_stand_beside_a_loader() -> None:
    options: dict[str, Any] = {"shuffle": False, "sampler": None, "drop_last": False}

    assert read(2, loader_of_four(), **options) == [0, 1, 2, 3]


def test_a_tensor_dataset_gives_tuples() -> None:
    data = TensorDataset(torch.arange(4), torch.arange(4) * 10)

    ((x, y), _) = dataloader(world(1, 2), data, ordinal=0, batch_size=1)

    assert (x.tolist(), y.tolist()) == ([1], [10])
