"""What users of other launchers reported about models and collectives, as it is here.

The numbers are those of the project's case log; each docstring says what went wrong elsewhere.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distribute import Context, RequestError, run
from tests.scripts import SLOW_METHODS, run_python, write

methods = pytest.mark.parametrize("method", ["fork", *SLOW_METHODS])


def on(devices: int, method: str) -> dict[str, Any]:
    return {"devices": devices, "start_method": method, "returns": "all"}


def gather_in_turn(ctx: Context) -> tuple[list[int], int, list[int]]:
    time.sleep(0.1 * (3 - ctx.rank))  # rank 3 comes first
    gathered = ctx.all_gather(torch.tensor([ctx.rank]))
    sent = ctx.broadcast(torch.tensor([ctx.rank + 5]), src=2)
    texts = ctx.all_gather("x" * 10**ctx.rank)
    assert ctx.all_gather_object("x" * 10**ctx.rank) == texts
    return [int(one) for one in gathered], int(sent), [len(one) for one in texts]


@methods
def test_c46_what_is_gathered_comes_in_the_order_of_ranks(method: str) -> None:
    """Doubt whether it does; objects of different pickled sizes."""
    found = run(gather_in_turn, **on(4, method))

    assert found == [([0, 1, 2, 3], 7, [1, 10, 100, 1000])] * 4


def reduce_all_kinds(ctx: Context) -> list[Any]:
    rank = ctx.rank
    kinds = [
        torch.tensor([rank + 1.0]),
        torch.tensor([rank + 1]),
        torch.tensor([rank == 1]),
        torch.arange(6.0).view(2, 3).t(),
        rank + 1.0,
    ]
    found: list[Any] = []
    for value in kinds:
        before = value.clone() if isinstance(value, torch.Tensor) else value
        for options in ({}, {"op": "sum"}, {"op": "mean"}):
            result = ctx.all_reduce(value, **options)
            found.append(result.flatten().tolist() if torch.is_tensor(result) else result)
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(before))
    return found


@methods
def test_c47_means_of_ints_and_bools(method: str) -> None:
    """A sum where a mean was expected; torch refuses the mean of ints."""
    one, two = run(reduce_all_kinds, **on(2, method))

    flat = [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert one == two
    assert one[:9] == [[3.0], [3.0], [1.5], [3], [3], [1.5], [1], [1], [0.5]]
    assert one[9:12] == [[2 * each for each in flat], [2 * each for each in flat], flat]
    assert one[12:] == [3.0, 3.0, 1.5]


def contrast(ctx: Context, differentiable: bool) -> tuple[str, float]:
    net = ctx.model(torch.nn.Linear(1, 1, bias=False))
    gathered = ctx.all_gather(net(torch.tensor([[1.0 + ctx.rank]])), differentiable=differentiable)
    loss = torch.cat([one.view(-1) for one in gathered]).sum() ** 2
    if not loss.requires_grad:
        return "none", 0.0
    loss.backward()
    (weight,) = net.parameters()
    return "linked", (weight.grad / weight.detach()).item()


@methods
def test_c48_gradients_through_all_gather(method: str) -> None:
    """What was gathered has no gradient, or one that is off by the number of ranks."""
    plain = run(contrast, False, **on(2, method))
    linked = run(contrast, True, **on(2, method))

    assert plain == [("none", 0.0)] * 2
    # As in one process: (3 w)^2 has the derivative 18 w.
    assert [kind for kind, _ in linked] == ["linked"] * 2
    assert [slope for _, slope in linked] == pytest.approx([18.0, 18.0], rel=1e-5)


def small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


def save_weights(ctx: Context, path: str) -> list[str]:
    net = ctx.model(small())
    net(torch.randn(4, 2)).sum().backward()
    if ctx.rank == 0:
        torch.save(net.state_dict(), path)
    ctx.barrier()
    return list(net.state_dict())


def load_weights(ctx: Context, path: str) -> tuple[str, list[float]]:
    net = ctx.model(small())
    report = net.load_state_dict(torch.load(path), strict=True)
    return str(report), net.state_dict()["0.weight"].flatten().tolist()


@methods
def test_c49_saved_weights_load_into_a_plain_model_and_back(tmp_path: Path, method: str) -> None:
    """Missing and unexpected keys, because of a prefix `module.`."""
    path = str(tmp_path / "w.pt")

    names = run(save_weights, path, **on(2, method))

    state = torch.load(path)
    assert names == [list(small().state_dict())] * 2
    assert str(small().load_state_dict(state, strict=True)) == "<All keys matched successfully>"
    for devices in (1, 2):
        options = on(devices, method) if devices > 1 else {"devices": 1, "returns": "all"}
        found = run(load_weights, path, **options)
        expected = "<All keys matched successfully>", state["0.weight"].flatten().tolist()
        assert found == [expected] * devices


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def train_branches(ctx: Context, **options: Any) -> str:
    net = ctx.model(Branches(), **options)
    for _ in range(3):
        net(torch.ones(1, 1)).sum().backward()
    return "done"


def train_all_branches(ctx: Context) -> str:
    return train_branches(ctx, find_unused_parameters=True)


@methods
def test_c50_parameters_without_gradient_are_named(method: str) -> None:
    """'Expected to have finished reduction in the prior iteration', a step late."""
    assert run(train_all_branches, **on(2, method)) == ["done", "done"]

    with pytest.raises(RequestError) as caught:
        run(train_branches, **on(2, method))

    message = str(caught.value)
    assert "parameters 'b.weight', 'b.bias' of Branches on rank " in message
    assert "find_unused_parameters=True" in message


def normalise(ctx: Context) -> tuple[float, float, float]:
    net = ctx.model(torch.nn.BatchNorm1d(1))
    for _ in range(3):
        net(torch.tensor([[0.0], [2.0]]) + 10 * ctx.rank).sum().backward()
    ctx.sync_buffers(net)
    net.eval()
    with torch.no_grad():
        y = net(torch.tensor([[5.0]]))
    return float(y), float(net.running_mean), float(net.state_dict()["running_mean"])


@methods
def test_c51_ranks_evaluate_with_the_same_running_statistics(method: str) -> None:
    """After the last step each rank has its own, and evaluates another model."""
    one, two = run(normalise, **on(2, method))

    assert one == two
    assert one[1] == one[2] == pytest.approx(0.271)  # of rank 0's batches, of mean 1


def accumulate_gradients(ctx: Context) -> list[float]:
    found: list[float] = []
    xs = torch.tensor([1.0, 2.0, 3.0]) + 10 * ctx.rank
    net = ctx.model(torch.nn.Linear(1, 1, bias=False))
    for x, _ in ctx.accumulate(net, xs, len(xs)):
        (net(x.view(1, 1)).sum() / len(xs)).backward()
    found.append(float(net.weight.grad))
    net.zero_grad()
    for number, x in enumerate(xs):
        if number < 2:
            with ctx.no_sync(net):
                (net(x.view(1, 1)).sum() / len(xs)).backward()
        else:
            (net(x.view(1, 1)).sum() / len(xs)).backward()
    found.append(float(net.weight.grad))
    return found


@methods
def test_c52_accumulated_gradients_are_those_of_the_whole_batch(method: str) -> None:
    """Synchronised at the wrong micro-batch, or not at all."""
    assert run(accumulate_gradients, **on(2, method)) == [pytest.approx([7.0, 7.0])] * 2
    assert run(accumulate_gradients, devices=1) == pytest.approx([2.0, 2.0])


def whole_gradient(ctx: Context, by_loader: bool) -> torch.Tensor:
    torch.manual_seed(0)
    net = ctx.model(torch.nn.Linear(3, 1))
    x, y = torch.arange(24.0).view(8, 3) / 24, torch.arange(8.0).view(8, 1)
    if by_loader:
        rows = list(zip(x, y, strict=True))
        (share,) = ctx.dataloader(rows, global_batch_size=8, shuffle=False)
        x, y = share
    else:
        part = 8 // ctx.world_size
        x, y = (one[ctx.rank * part : (ctx.rank + 1) * part] for one in (x, y))
    torch.nn.functional.mse_loss(net(x), y).backward()
    return torch.cat([one.grad.flatten() for one in net.parameters()])


@methods
@pytest.mark.parametrize("by_loader", [False, True])
def test_c53_ranks_have_the_gradient_of_one_process(method: str, by_loader: bool) -> None:
    """The loss or the gradient is scaled by the number of devices."""
    alone = run(whole_gradient, by_loader, devices=1)

    for devices in (2, 4):
        found = run(whole_gradient, by_loader, **on(devices, method))
        assert len(found) == devices
        for gradient in found:
            torch.testing.assert_close(gradient, alone, rtol=0, atol=1e-5)


def write_and_read(ctx: Context, out: str) -> list[int]:
    os.makedirs(os.path.join(out, "runs", "a"), exist_ok=True)
    path = os.path.join(out, "runs", "b", "ckpt.pt")
    seen: list[int] = []
    for step in range(5):
        state = {"step": step, "pad": torch.zeros(500_000)} if ctx.is_main_process else None
        ctx.save(state, path)
        seen.append(ctx.load(path)["step"])
        ctx.barrier()
    return seen


@methods
def test_c54_rank_0_writes_and_everyone_reads(tmp_path: Path, method: str) -> None:
    """FileExistsError at the start, half-written files, one writer for each node."""
    assert run(write_and_read, str(tmp_path), **on(4, method)) == [[0, 1, 2, 3, 4]] * 4
    assert os.listdir(tmp_path / "runs" / "b") == ["ckpt.pt"]


@pytest.mark.slow
def test_c54_twenty_times(tmp_path: Path) -> None:
    for number in range(20):
        out = tmp_path / str(number)
        assert run(write_and_read, str(out), **on(4, "fork")) == [[0, 1, 2, 3, 4]] * 4


@pytest.mark.slow
def test_c46_to_c53_in_a_script_that_is_run_again(tmp_path: Path) -> None:
    """The same under re-exec, where rank 0 is the script itself."""
    script = write(
        tmp_path,
        """
        import torch
        from distribute import run
        import tests.test_cases_model as cases

        if __name__ == "__main__":
            found = run(cases.gather_in_turn, devices=4, returns="all")
            print("C46", found == [([0, 1, 2, 3], 7, [1, 10, 100, 1000])] * 4)
            two = {"devices": 2, "returns": "all"}
            print("C48", [round(slope, 3) for _, slope in run(cases.contrast, True, **two)])
            print("C52", run(cases.accumulate_gradients, **two))
            one = run(cases.whole_gradient, True, devices=1)
            same = [torch.allclose(each, one) for each in run(cases.whole_gradient, True, **two)]
            print("C53", same)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("C4") == ["C46 True", "C48 [18.0, 18.0]"]
    assert ended.lines("C5") == ["C52 [[7.0, 7.0], [7.0, 7.0]]", "C53 [True, True]"]
