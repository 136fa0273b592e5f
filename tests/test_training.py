"""Training on N ranks is training on one with the N-times-larger batch, to the last digits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distribute.collectives import all_gather
from distribute.model import accumulate, sync_buffers, unwrap, wrap
from distribute.reduction import all_reduce
from distribute.world import World
from tests.ranks import alone, on_ranks

STEPS = 50
BATCH = 24  # of all ranks; 2, 3 and 4 divide it and its halves
WIDTH = 4


def batches(world: World, micro: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each batch; of each of its micro-batches."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)
        y = torch.randn(BATCH, 1, dtype=torch.float64, generator=generator)
        for part_x, part_y in zip(x.chunk(micro), y.chunk(micro), strict=True):
            share = slice(world.rank, None, world.world_size)
            yield part_x[share], part_y[share]


def made(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).double()


def network() -> nn.Module:
    torch.manual_seed(3)
    return made(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def mse(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, wanted)


def plain(world: World, clip: float | None = None) -> list[nn.Module]:
    model = wrap(world, network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(world):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > clip  # otherwise it does nothing
        optimizer.step()
    return [model]


def clipped(world: World) -> list[nn.Module]:
    return plain(world, clip=0.05)


def accumulated(world: World) -> list[nn.Module]:
    """Two micro-batches a step."""
    model = wrap(world, network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = 0
    loader = batches(world, micro=2) if world.world_size > 1 else batches(world)
    n = 2 if world.world_size > 1 else 1
    for (x, y), step in accumulate(model, loader, n):
        (mse(model(x), y) / n).backward()
        if step:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == STEPS
    return [model]


def with_frozen_statistics(world: World) -> list[nn.Module]:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    model = wrap(world, made(nn.Linear(WIDTH, 8), norm, nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    norm.eval()
    for x, y in batches(world):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return [model]


def with_frozen_parts(world: World) -> list[nn.Module]:
    module = network()
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    before = module[0].weight.detach().clone()
    model = wrap(world, module)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    for x, y in batches(world):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    assert torch.equal(module[0].weight, before)
    return [model]


def adversaries(world: World, *, freeze: bool = True) -> list[nn.Module]:
    """Two models; the discriminator runs twice a step, and is frozen in the generator's turn."""
    torch.manual_seed(3)
    generator = wrap(world, made(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)))
    discriminator = wrap(world, made(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_g = torch.optim.AdamW(generator.parameters(), lr=0.01)
    of_d = torch.optim.AdamW(discriminator.parameters(), lr=0.01)
    for noise, real in batches(world):
        of_d.zero_grad()
        right = discriminator(real)
        wrong = discriminator(generator(noise).detach())
        (mse(right, torch.ones_like(right)) + mse(wrong, torch.zeros_like(wrong))).backward()
        of_d.step()
        of_g.zero_grad()
        discriminator.requires_grad_(not freeze)
        wrong = discriminator(generator(noise))
        mse(wrong, torch.ones_like(wrong)).backward()
        of_g.step()
        discriminator.requires_grad_(True)
    return [generator, discriminator]


def adversaries_unfrozen(world: World) -> list[nn.Module]:
    return adversaries(world, freeze=False)


class Losing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self(x), y)


def by_a_method(world: World) -> list[nn.Module]:
    model = wrap(world, Losing(), forward="loss")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(world):
        optimizer.zero_grad()
        model.loss(x, y).backward()
        optimizer.step()
    return [model]


def with_static_graph(world: World) -> list[nn.Module]:
    model = wrap(world, network(), static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(world):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return [model]


def checkpointed(world: World) -> list[nn.Module]:
    """Activations are computed again in backward."""
    from torch.utils.checkpoint import checkpoint

    class Saving(Losing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.net):
                x = checkpoint(layer, x, use_reentrant=False) if number else layer(x)
            return x

    model = wrap(world, Saving())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(world):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return [model]


def by_hand(world: World) -> list[nn.Module]:
    """A loss whose normalisation only all ranks together know, through a sum with gradients."""
    model = wrap(world, network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(world):
        optimizer.zero_grad()
        squared = (model(x) - y).square().sum()
        # Every rank has the loss of the whole batch.
        (all_reduce(world, squared, differentiable=True) / BATCH).backward()
        optimizer.step()
    return [model]


TRAINED: list[Callable[[World], list[nn.Module]]] = [
    plain, clipped, accumulated, with_frozen_statistics, with_frozen_parts, adversaries,
    adversaries_unfrozen, by_a_method, with_static_graph, checkpointed, by_hand,
]  # fmt: skip


QUICK = [
    (plain, 2),
    (plain, 3),
    (plain, 4),
    (accumulated, 3),
    *((train, 2) for train in TRAINED[1:]),
]
SLOW = [(train, size) for size in (3, 4) for train in TRAINED if (train, size) not in QUICK]


@pytest.mark.parametrize(
    ("train", "size"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)],
)
def test_n_ranks_train_like_one_process(
    train: Callable[[World], list[nn.Module]], size: int
) -> None:
    def fn(world: World) -> tuple[int, list[dict[str, torch.Tensor]]]:
        return world.world_size, [{**model.state_dict()} for model in train(world)]

    expected = [model.state_dict() for model in train(alone())]

    for found_size, found in on_ranks(size, fn):
        assert found_size == size
        assert len(found) == len(expected)
        for state, wanted in zip(found, expected, strict=True):
            assert state.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-12)


def test_the_comparison_would_see_ranks_that_do_not_synchronise() -> None:
    def fn(world: World) -> torch.Tensor:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for x, y in batches(world):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
        return model[0].weight.detach()

    (expected,) = plain(alone())
    for found in on_ranks(2, fn):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(found, expected[0].weight.detach(), rtol=1e-3, atol=1e-3)


# -- beside the loop ---------------------------------------------------------------------------


def same_on_all(world: World, model: nn.Module) -> bool:
    mine = torch.cat([one.detach().flatten().double() for one in unwrap(model).parameters()])
    rows = [torch.empty_like(mine) for _ in range(world.world_size)]
    dist.all_gather(rows, mine)
    return all(torch.equal(row, mine) for row in rows)


def test_an_average_of_the_weights_is_a_plain_module_and_the_same_on_all_ranks() -> None:
    def fn(world: World) -> tuple[str, bool, list[str]]:
        model = wrap(world, network())
        average = copy.deepcopy(model).requires_grad_(False)
        swa = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(world):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(now, 0.1)
            swa.update_parameters(model)
        assert same_on_all(world, swa.module)
        if world.rank == 0:
            average(torch.ones(1, WIDTH).double())  # no collective
        return type(average).__name__, same_on_all(world, average), list(average.state_dict())

    names = list(network().state_dict())
    assert on_ranks(2, fn) == [("Sequential", True, names)] * 2


def test_autocast_in_bfloat16() -> None:
    def fn(world: World) -> tuple[str, bool, float, float]:
        model = wrap(world, network().float())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for x, y in batches(world):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = model(x.float())
                loss = mse(output.float(), 0.1 * y.float())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ends = losses[0], losses[-1]
        return str(output.dtype), same_on_all(world, model), *all_reduce(world, ends, "mean")

    for dtype, same, first, last in on_ranks(2, fn):
        assert dtype == "torch.bfloat16"
        assert same
        assert last < first


def test_a_scaler_skips_the_step_on_all_ranks_when_one_overflows() -> None:
    def fn(world: World) -> list[tuple[float, bool]]:
        model = wrap(world, network().float())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        found = []
        for step in range(2):
            optimizer.zero_grad()
            before = model[0].weight.detach().clone()
            x = torch.ones(2, WIDTH)
            if step == 0 and world.rank == 1:
                x *= torch.inf
            scaler.scale(model(x).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append((scaler.get_scale(), torch.equal(model[0].weight, before)))
        assert same_on_all(world, model)
        return found

    assert on_ranks(2, fn) == [[(4.0, True), (4.0, False)]] * 2


def test_evaluation_after_training_is_the_same_on_all_ranks() -> None:
    def fn(world: World) -> list[float]:
        torch.manual_seed(0)
        model = wrap(world, made(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
        for x, y in batches(world):
            mse(model(x), y).backward()
        sync_buffers(world, model)
        model.eval()
        with torch.no_grad():
            return all_gather(world, model(torch.ones(1, WIDTH).double()).item())

    for values in on_ranks(2, fn):
        assert len(values) == 2
        assert values[0] == values[1]
