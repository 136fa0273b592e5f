"""Where a worker starts: its variables, its device, its part of the cores."""

from __future__ import annotations

import os
import sys

import pytest

from distribute.environment import WORKER_MARKER, external_world, is_worker
from distribute.place import RANK_VARIABLES, Place, marked, places, worker_environ


def made(
    *, accelerator: str = "cpu", devices: tuple[int, ...] = (0, 1), cores: int = 8, **environ: str
) -> list[Place]:
    return places(accelerator=accelerator, devices=devices, cores=cores, port=4242, environ=environ)


def test_every_rank_has_the_full_set_that_torchrun_sets():
    for rank, place in enumerate(made(devices=(0, 1, 2))):
        here = place.environ
        assert place.rank == rank
        assert place.world_size == 3
        assert here["RANK"] == here["LOCAL_RANK"] == str(rank)
        assert here["WORLD_SIZE"] == here["LOCAL_WORLD_SIZE"] == "3"
        assert here["GROUP_RANK"] == here["NODE_RANK"] == "0"
        assert here["MASTER_ADDR"] == "127.0.0.1"
        assert here["MASTER_PORT"] == "4242"


def test_a_stale_rank_of_the_launcher_does_not_reach_a_worker():
    stale = {"RANK": "9", "LOCAL_RANK": "9", "WORLD_SIZE": "99", "MASTER_PORT": "1"}

    here = made(**stale)[1].environ

    assert (here["RANK"], here["LOCAL_RANK"]) == ("1", "1")
    assert (here["WORLD_SIZE"], here["MASTER_PORT"]) == ("2", "4242")


def test_the_rest_of_the_environment_is_the_launchers():
    here = made(MY_SETTING="x y", PATH="/bin")[0].environ

    assert (here["MY_SETTING"], here["PATH"]) == ("x y", "/bin")


def test_nothing_is_written_beyond_the_named_variables():
    written = worker_environ({}, 1, 2, 4242, 4)

    assert set(written) == set(RANK_VARIABLES)


def test_a_worker_does_not_end_at_a_prompt():
    assert "PYTHONINSPECT" not in made(PYTHONINSPECT="1")[0].environ


def test_a_program_that_a_rank_starts_is_no_rank():
    here = made(**{WORKER_MARKER: "7:29500:4321"})[0].environ

    assert external_world(here) is None
    assert not is_worker(here, 4321)
    assert not is_worker(here, os.getpid())


def test_a_marked_process_is_a_worker():
    assert is_worker({WORKER_MARKER: marked(4321, 29500)}, 4321)
    assert not is_worker({WORKER_MARKER: marked(4321, 29500)}, 4322)


@pytest.mark.parametrize(("cores", "threads"), [(8, 4), (9, 4), (2, 1), (1, 1)])
def test_ranks_share_the_cores(cores: int, threads: int):
    for place in made(cores=cores):
        assert place.threads == threads
        assert place.environ["OMP_NUM_THREADS"] == str(threads)


def test_a_number_of_threads_that_the_user_set_is_kept():
    for place in made(OMP_NUM_THREADS="3"):
        assert place.threads is None
        assert place.environ["OMP_NUM_THREADS"] == "3"


def test_gloo_stays_on_the_loopback_unless_the_user_set_an_interface():
    loopback = "lo0" if sys.platform == "darwin" else "lo"

    assert made()[0].environ["GLOO_SOCKET_IFNAME"] == loopback
    assert made(GLOO_SOCKET_IFNAME="eth7")[0].environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_rank_has_the_device_that_was_asked_for():
    assert [one.device_index for one in made(accelerator="cuda", devices=(3, 1))] == [3, 1]
    assert [one.device_index for one in made(accelerator="cpu")] == [None, None]
    assert [one.device_index for one in made(accelerator="mps", devices=(0,))] == [None]


def test_a_worker_is_where_the_launcher_is():
    before = os.umask(0o027)
    try:
        place = made()[0]
        after = os.umask(0o027)
    finally:
        os.umask(before)

    assert (place.umask, after) == (0o027, 0o027)
    assert place.cwd == os.getcwd()
    assert place.sys_path == sys.path
    assert place.argv == sys.argv
    assert place.launcher == os.getpid()
