"""On machines with GPUs. None of this runs elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distribute import Context, RequestError, run
from tests.scripts import run_python, write

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="no GPU here"),
    pytest.mark.timeout(300),
]


def body(ctx: Context) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ctx.model(torch.nn.Linear(4, 2))
    loss = model(torch.ones(3, 4, device=ctx.device)).sum()
    loss.backward()
    batches = [x.device.type for x in ctx.dataloader(torch.arange(4.0), batch_size=1)]
    return {
        "rank": ctx.rank,
        "device": str(ctx.device),
        "current": torch.cuda.current_device(),
        "backend": ctx.backend,
        "sum": ctx.all_reduce(ctx.rank + 1),
        "objects": ctx.all_gather_object({"rank": ctx.rank}),
        "batches": set(batches),
        "grad": model.weight.grad,
        "model": ctx.unwrap(model),
    }


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_every_gpu_is_a_rank(method: str) -> None:
    """Each rank has its own device, nccl joins them, values come back on the CPU."""
    found = run(body, devices=GPUS, accelerator="cuda", start_method=method, returns="all")

    assert [one["rank"] for one in found] == list(range(GPUS))
    for rank, one in enumerate(found):
        assert one["device"] == f"cuda:{rank}"
        assert one["current"] == rank
        assert one["backend"] == "nccl"
        assert one["sum"] == GPUS * (GPUS + 1) // 2
        assert one["objects"] == [{"rank": other} for other in range(GPUS)]
        assert one["batches"] <= {"cuda"}
        assert one["grad"].device.type == "cpu"
        assert {value.device.type for value in one["model"].state_dict().values()} == {"cpu"}


def step(ctx: Context, net: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> list[float]:
    model = ctx.model(net)
    optimizer.zero_grad()
    model(torch.ones(3, 4, device=ctx.device)).sum().backward()
    optimizer.step()
    return model.weight.flatten().tolist()


@pytest.mark.parametrize("method", ["auto", "forkserver"])
@pytest.mark.parametrize("fused", [False, True])
def test_training_on_gpus_goes_on_from_call_to_call(method: str, fused: bool) -> None:
    """The state comes to the caller's device, and goes to the ranks' again."""
    net = torch.nn.Linear(4, 2)
    weight = net.weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    devices = 1 if method == "auto" else GPUS

    for count in (1, 2):
        found = run(step, net, optimizer, devices=devices, accelerator="cuda", start_method=method)
        assert net.weight is weight
        assert weight.flatten().tolist() == found
        kept = optimizer.state[weight]
        assert kept["step"].item() == count
        assert kept["exp_avg"].device == weight.device
        assert weight.device.type == ("cuda" if method == "auto" else "cpu")

    before = weight.tolist()
    run(step, net, optimizer, devices=devices, accelerator="cuda", start_method=method,
        write_back=False)  # fmt: skip
    assert weight.tolist() == before


def test_one_gpu_is_inline() -> None:
    """No process, no group, the device is used."""
    found = run(body, devices=1, accelerator="cuda")

    assert found["device"] == "cuda:0"
    assert found["sum"] == 1


def test_a_script_reexecutes_for_every_gpu(tmp_path: Path) -> None:
    """The caller is rank 0 on its device."""
    script = write(
        tmp_path,
        """
        import torch
        from distribute import distributed

        @distributed(accelerator="cuda", returns="all")
        def train(ctx):
            return str(ctx.device), ctx.all_reduce(1)

        if __name__ == "__main__":
            print("GOT", train() == [(f"cuda:{i}", torch.cuda.device_count())
                                     for i in range(torch.cuda.device_count())])
        """,
    )

    ended = run_python(script, timeout=200)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT True"]


def test_a_living_context_forbids_a_fork_and_only_that() -> None:
    """The automatic choice goes to the fork server; asking for a fork is refused with advice."""
    torch.ones(1, device="cuda")

    with pytest.raises(RequestError, match="CUDA context"):
        run(body, devices=2, accelerator="cpu", strategy="ddp_fork")
    assert run(lambda ctx: ctx.all_gather(ctx.rank), devices=2, accelerator="cpu") == [0, 1]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("accelerator", ["cuda", "cpu"])
def test_arguments_on_a_gpu_arrive_on_the_device_of_the_rank(accelerator: str) -> None:
    """Tensors, views and tied weights; what comes back is on the CPU."""

    def where(ctx: Context, data: torch.Tensor, view: torch.Tensor, net: Tied) -> Any:
        view[0] = 7
        assert data[2] == 7
        assert net.first.weight is net.second.weight
        found = {str(one.device) for one in (data, view, *net.parameters())}
        return ctx.all_gather_object((str(ctx.device), found)), data, net

    data = torch.zeros(5, device="cuda")
    ranks = GPUS if accelerator == "cuda" else 2
    devices, back, net = run(
        where, data, data[2:], Tied().cuda(), devices=ranks, accelerator=accelerator,
        start_method="forkserver",
    )  # fmt: skip

    assert len(devices) == ranks
    for own, found in devices:
        assert found == {own}
    assert data.tolist() == [0] * 5
    assert back.tolist() == [0, 0, 7, 0, 0]
    assert back.device.type == "cpu"
    assert {one.device.type for one in net.parameters()} == {"cuda"}  # it is the caller's own


def normalise(ctx: Context) -> tuple[list[float], list[float], list[float]]:
    torch.manual_seed(0)
    whole = torch.randn(4 * ctx.world_size, 3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model = ctx.model(net, sync_batchnorm=True)
    share = whole[ctx.rank :: ctx.world_size].to(ctx.device)
    (model(share)[:, 0] ** 3).mean().backward()
    weight, norm = model[0].weight, model[1]
    return weight.grad.flatten().tolist(), norm.running_mean.tolist(), norm.running_var.tolist()


def test_batchnorm_of_all_ranks_is_that_of_the_whole_batch() -> None:
    """SyncBatchNorm: as one process with the batch of all."""
    found = run(normalise, devices=GPUS, accelerator="cuda", returns="all")

    torch.manual_seed(0)
    whole = torch.randn(4 * GPUS, 3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    (net(whole)[:, 0] ** 3).mean().backward()
    expected = net[0].weight.grad.flatten(), net[1].running_mean, net[1].running_var
    for one in found:
        for value, wanted in zip(one, expected, strict=True):
            torch.testing.assert_close(torch.tensor(value), wanted, rtol=1e-3, atol=1e-4)


def scale(ctx: Context) -> list[tuple[float, list[float]]]:
    model = ctx.model(torch.nn.Linear(2, 1).half().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        x = torch.ones(2, 2, device=ctx.device)
        if step == 0 and ctx.rank == ctx.world_size - 1:
            x *= torch.inf
        with torch.autocast("cuda", torch.float16):
            loss = model(x).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), model.weight.flatten().tolist()))
    return found


def test_a_scaler_skips_the_step_on_all_ranks() -> None:
    """Its scale, and the weights, stay equal on all of them."""
    found = run(scale, devices=GPUS, accelerator="cuda", returns="all")

    assert all(one == found[0] for one in found)
    assert [factor for factor, _ in found[0]] == [4.0, 4.0]
    assert found[0][0][1] != found[0][1][1]
