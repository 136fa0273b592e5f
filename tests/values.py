"""What travels to the ranks and back, under one start method: `python values.py METHOD`.

Run by test_values.py, and by nothing of pytest: re-exec needs a script of its own. The arguments of
re-exec's first call go another way than those of its later calls, so the checks run in both.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import distribute
from distribute import Context, run
from tests import values_module
from tests.values_module import Setting, Stage

METHOD = sys.argv[1] if len(sys.argv) > 1 else "fork"
LARGE = 300 << 20  # bytes
# Re-exec serves the first call of a script; the automatic choice goes on from there.
FIRST: dict[str, Any] = {"start_method": METHOD}
LATER: dict[str, Any] = {} if METHOD == "reexec" else FIRST


class Mode(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass(frozen=True)
class Inner:
    mode: Mode
    out: Path


@dataclasses.dataclass
class Config:
    inner: Inner
    stage: Stage
    settings: list[Setting]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 40)
        self.head = nn.Linear(40, 30, bias=False)
        self.head.weight = self.embed.weight


CONFIG = Config(Inner(Mode.FAST, Path("out")), Stage.TRAIN, [Setting(3, Stage.EVAL)])


def kinds() -> dict[str, torch.Tensor]:
    """Tensors of the kinds that need care."""
    base = torch.arange(20.0)
    quantized = torch.quantize_per_tensor(base, 0.1, 0, torch.qint8)
    return {
        "leaf": torch.ones(3, requires_grad=True),
        "bfloat16": base.to(torch.bfloat16),
        "sparse": torch.eye(4).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "quantized": quantized,
        "complex": torch.complex(base, base),
        "strided": base.reshape(4, 5).t(),
        "view": base[3:7],
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(5),
        "bool": base > 3,
        "expanded": torch.ones(1).expand(1000),
        "parameter": nn.Parameter(base),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_quantized:
        return bool(torch.equal(one.int_repr(), other.int_repr()))
    one, other = (x.to_dense() if x.layout != torch.strided else x for x in (one, other))
    return one.dtype == other.dtype and bool(torch.equal(one, other))


def first(ctx: Context, config: Config, many: list[torch.Tensor], net: Net, scale: Any) -> Any:
    """The first call: small things, and many of them."""
    assert ctx.world_size == 2
    found = {name: same(one, kinds()[name]) for name, one in config_kinds(config).items()}
    assert all(found.values()), found
    return {
        "config": config == CONFIG and type(config) is Config and type(config.stage) is Stage,
        "identity": config.inner.mode is Mode.FAST and config.settings[0].stage is Stage.EVAL,
        "many": [len(many), sum(float(one.sum()) for one in many)],
        "tied": net.head.weight is net.embed.weight,
        "scale": scale(4),
        "ranks": ctx.all_gather(ctx.rank),
        "back": (config, [one * 2 for one in many], lambda x: x + config.settings[0].size),
        "kinds": kinds(),
    }


def config_kinds(config: Config) -> dict[str, torch.Tensor]:
    return getattr(config, "kinds")  # noqa: B009 - no field of it


def arguments() -> tuple[Any, ...]:
    config = dataclasses.replace(CONFIG)
    config.kinds = kinds()  # type: ignore[attr-defined]
    factor = 10
    many = [torch.full((n % 50,), float(n)) for n in range(3000)]
    return config, many, Net(), lambda x: x * factor


def small(options: dict[str, Any]) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    total = sum(float(n) * (n % 50) for n in range(3000))
    results = run(first, *arguments(), devices=2, returns="all", **options)
    assert len(results) == 2
    for found in results:
        assert found["config"], found["config"]
        assert found["identity"]
        assert found["many"] == [3000, total]
        assert found["tied"]
        assert found["scale"] == 40
        assert found["ranks"] == [0, 1]
        config, doubled, function = found["back"]
        assert config == CONFIG
        assert config.inner.mode is Mode.FAST
        assert type(config.settings[0]) is values_module.Setting
        assert sum(float(one.sum()) for one in doubled) == 2 * total
        assert function(1) == 4
        for name, one in kinds().items():
            back = found["kinds"][name]
            assert same(back, one.detach()), name
            assert not back.requires_grad or name == "parameter", name
        found["kinds"]["view"][0] = 7  # writable
        doubled[7].add_(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    print("ok small", options)


def large(kind: str) -> None:
    """300 MB there and back; the ranks see all of it, and write into their own."""

    def body(ctx: Context, given: Any) -> Any:
        ends = [int(given[0]), int(given[-1]), len(given)]
        if not isinstance(given, bytes):
            given[0] = 50 + ctx.rank
        assert ctx.all_gather(ends) == [ends, ends]
        return ends, given

    made: Any
    if kind == "bytes":
        made = b"\x01" + bytes(LARGE - 2) + b"\x02"
    elif kind == "array":
        made = np.zeros(LARGE, np.uint8)
        made[0], made[-1] = 1, 2
    else:
        made = torch.zeros(LARGE, dtype=torch.uint8)
        made[0], made[-1] = 1, 2
    ends, back = run(body, made, devices=2, **LATER)
    assert ends == [1, 2, LARGE]
    assert type(back) is type(made)
    assert [int(back[-1]), len(back)] == [2, LARGE]
    assert [int(made[-1]), len(made)] == [2, LARGE]
    if kind != "bytes":
        assert int(back[0]) == 50
        back[-1] = 9  # writable, after its rank has gone
    print("ok", kind)


def main() -> None:
    before = set(os.listdir("/dev/shm"))
    small(FIRST)
    if METHOD == "reexec":
        small(LATER)
    for kind in ("bytes", "array", "tensor"):
        large(kind)
    assert set(os.listdir("/dev/shm")) == before
    assert distribute.is_worker() is False
    print("ok all")


if __name__ == "__main__":
    main()
