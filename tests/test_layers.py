"""Who may know whom: imports point down, and some names are spelled in one place only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "distribute"

# From the top. A module imports from lines below its own only: at its head, inside a function, or
# for types.
LAYERS = """
__init__
api
kept
decorated
engine
launchers.attached launchers.fork launchers.forkserver launchers.inline launchers.reexec launchers.spawn
lead server
crew forked
supervise worker
snapshot
report arrival stopping
failure
context
model data
replica
watch
loading
asked iterables progress transfer
indices
alike barriers randomness
collectives
reduction
scalars
agreement parcel
sharding
ending deadline meeting outcome link
gradients groups
state task
changes
messages
plan channel
display machine request place payload home
record output
consumer
sent
memory
ambient cgroup checkpoint command devices environment handlers interrupt openmp process rendezvous stateful tree world
culprit variables
cells errors hosting lifeline notice reference scratch threads
launchers.__init__
"""  # noqa: E501
RANK = {name: -row for row, line in enumerate(LAYERS.split("\n")) for name in line.split()}

# Names of modules further up that stand in strings, and why they may.
LOOKS_UP = {
    ("task", "context"): "knows the class, if it is loaded, without importing torch for it",
    ("payload", "decorated"): "tells a decorated function, which passes for the function inside",
}

# What stands above `worker` and uses torch.distributed nevertheless.
GROUPED = {
    "launchers.attached": "the calling process is the rank, and may hold a group of its own",
}

# Variables that make a process a rank, and that torchrun adds to them.
RANK_VARIABLE = re.compile(
    r"(GROUP_|LOCAL_|NODE_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|DISTRIBUTE_\w+|(SLURM|OMPI|PMI|JSM)_\w+|OMP_NUM_THREADS|GLOO_SOCKET_IFNAME"
)
SPELLED = {
    "environment": "reads them",
    "place": "writes them",
}
SPELLED_ONCE = {
    ("launchers.forkserver", "OMP_NUM_THREADS"): "the one variable that needs no new server",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


SOURCES = {name_of(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imported(tree: ast.AST) -> set[str]:
    """Full names of everything that a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            found |= {f"{node.module}.{one.name}" for one in node.names}
    return found


def own(full: str) -> str | None:
    """The module of this package that a full name leads to."""
    if full.partition(".")[0] != "distribute":
        return None
    rest = full.removeprefix("distribute").removeprefix(".")
    while rest and rest not in RANK:
        rest = rest.rpartition(".")[0]
    return rest or "__init__"


def strings(tree: ast.AST) -> set[str]:
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_module_has_its_layer():
    assert set(SOURCES) == set(RANK)


@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_down(name: str):
    found = {own(full) for full in imported(SOURCES[name])} - {None}
    upward = {one for one in found if one is not None and RANK[one] >= RANK[name]}

    assert not upward


def test_strings_point_down_too():
    upward = {
        (name, one)
        for name, tree in SOURCES.items()
        for text in strings(tree)
        if re.fullmatch(r"distribute\.[\w.]+", text)
        and (one := own(text)) not in (None, "__init__")
        and RANK[one] >= RANK[name]
    }

    assert upward == set(LOOKS_UP)


def test_nothing_above_the_worker_uses_torch_distributed():
    above = {name for name, rank in RANK.items() if rank > RANK["context"] and name != "worker"}
    using = {
        name
        for name in above
        if any(full.startswith("torch.distributed") for full in imported(SOURCES[name]))
    }

    assert using == set(GROUPED)


def test_variables_of_ranks_are_read_in_one_module_and_written_in_one():
    spelled = {
        (name, text)
        for name, tree in SOURCES.items()
        if name not in SPELLED
        for text in strings(tree)
        if RANK_VARIABLE.fullmatch(text)
    }

    assert spelled == set(SPELLED_ONCE)


def test_the_environment_is_read_from_a_mapping():
    """`resolve` and what it calls get it as an argument, so that a test can give another one."""
    assert not [
        name for name in ("plan", "request", "environment") if "os" in imported(SOURCES[name])
    ]


def test_the_only_package_inside_is_of_launchers():
    assert {name.partition(".")[0] for name in SOURCES if "." in name} == {"launchers"}
