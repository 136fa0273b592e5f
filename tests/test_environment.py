"""Which variables make this process a rank of somebody else, and which make it ours."""

from __future__ import annotations

import pytest

from distribute.environment import (
    WORKER_MARKER,
    external_world,
    is_worker,
    partial_world,
    worker_descriptors,
)
from distribute.errors import RequestError

NEEDED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
TORCHRUN = {
    **NEEDED,
    "GROUP_RANK": "2",
    "LOCAL_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def test_no_variables_are_no_world():
    assert external_world({"PATH": "/bin", "HOME": "/root"}) is None


@pytest.mark.parametrize("missing", NEEDED)
def test_a_set_without_one_variable_means_nothing(missing: str):
    partial = {name: value for name, value in TORCHRUN.items() if name != missing}

    assert external_world(partial) is None


@pytest.mark.parametrize("name", [*NEEDED, "TORCHELASTIC_RUN_ID", "NODE_RANK", "SLURM_JOB_ID"])
def test_a_lone_variable_means_nothing(name: str):
    assert external_world({name: TORCHRUN.get(name, "1")}) is None


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["LOCAL_RANK"], "LOCAL_RANK is set without RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"], "RANK, LOCAL_RANK are set without "),
        (["NODE_RANK"], "NODE_RANK is set without RANK"),
        (["MASTER_ADDR", "MASTER_PORT"], ""),
        (list(NEEDED), ""),
        ([], ""),
    ],
)
def test_variables_that_make_no_rank_are_named(names: list[str], text: str):
    found = partial_world(dict.fromkeys(names, "1"))

    assert found.startswith(text)
    assert bool(found) is bool(text)


def test_torchrun():
    found = external_world(TORCHRUN)

    assert found is not None
    assert found.by == "torchrun"
    assert (found.rank, found.local_rank, found.node_rank) == (5, 1, 2)
    assert (found.world_size, found.local_world_size, found.num_nodes) == (8, 2, 4)
    assert (found.master_addr, found.master_port) == ("node-a", 29500)
    assert found.hosted


def test_variables_set_by_hand():
    found = external_world(NEEDED)

    assert found is not None
    assert "RANK" in found.by
    assert (found.node_rank, found.local_world_size, found.num_nodes) == (0, 8, 1)
    assert not found.hosted


def test_a_static_torchrun_does_not_host_the_store():
    found = external_world({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"})

    assert found is not None
    assert not found.hosted


def test_the_node_is_known_by_either_name():
    by_hand = external_world({**NEEDED, "NODE_RANK": "3"})
    both = external_world({**TORCHRUN, "NODE_RANK": "3"})

    assert by_hand is not None
    assert both is not None
    assert (by_hand.node_rank, both.node_rank) == (3, 2)


@pytest.mark.parametrize("marker", ["-:{port}:1", "7:{port}:1", "-:{port}:0"])
def test_variables_inherited_from_a_worker_of_ours_make_no_rank(marker: str):
    """A program that a rank starts has all of them, and is no rank."""
    inherited = {**TORCHRUN, WORKER_MARKER: marker.format(port=TORCHRUN["MASTER_PORT"])}

    assert external_world(inherited) is None
    assert not is_worker(inherited, pid=4321)
    assert worker_descriptors(inherited, pid=4321) is None


def test_torchrun_in_a_rank_of_ours_makes_ranks_of_its_own():
    """The variables are torchrun's then; only the marker is inherited."""
    nested = {**TORCHRUN, WORKER_MARKER: "7:1:1"}
    assert TORCHRUN["MASTER_PORT"] != "1"

    found = external_world(nested)

    assert found is not None
    assert found.rank == int(TORCHRUN["RANK"])


@pytest.mark.parametrize(
    ("name", "text"),
    [("RANK", ""), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "0"), ("RANK", "x")],
)
def test_a_variable_that_makes_no_sense_is_named(name: str, text: str):
    with pytest.raises(RequestError, match=f"{name}='{text}' in the environment"):
        external_world({**TORCHRUN, name: text})


def test_a_worker_is_the_process_that_the_marker_names():
    assert is_worker({WORKER_MARKER: "7:29500:4321"}, pid=4321)
    assert is_worker({WORKER_MARKER: "-:29500:4321"}, pid=4321)
    assert not is_worker({WORKER_MARKER: "7:29500:4321"}, pid=432)
    assert not is_worker({WORKER_MARKER: "4321"}, pid=4321)
    assert not is_worker({}, pid=4321)


def test_only_a_reexecuted_worker_has_a_descriptor():
    assert worker_descriptors({WORKER_MARKER: "7,8,9,5:29500:4321"}, pid=4321) == (7, 8, 9, 5)
    assert worker_descriptors({WORKER_MARKER: "-:29500:4321"}, pid=4321) is None
    assert worker_descriptors({WORKER_MARKER: ":29500:4321"}, pid=4321) is None
    assert worker_descriptors({}, pid=4321) is None
