"""Every choice and every refusal of `resolve`, from plain facts."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any

import numpy
import pytest

from distribute.errors import RequestError
from distribute.machine import Machine
from distribute.place import worker_environ
from distribute.plan import Plan, resolve
from distribute.request import Request

SCRIPT = ("/usr/bin/python", "train.py")
NO_SCRIPT = "there is no script on disk"

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
TWO_NODES = {**TORCHRUN, "WORLD_SIZE": "4"}


def cpus(**facts: Any) -> Machine:
    """A script on a machine without an accelerator."""
    return Machine(**{"cores": 8, "script": SCRIPT, **facts})


def gpus(count: int = 4, **facts: Any) -> Machine:
    """A script on a machine with CUDA devices."""
    backends = frozenset({"gloo", "nccl"})
    return cpus(accelerators={"cuda": count}, backends=backends, **facts)


def mac(**facts: Any) -> Machine:
    return cpus(accelerators={"mps": 1}, can_fork=False, **facts)


class Entry:
    """A path object of another make."""

    def __init__(self, path: str | bytes) -> None:
        self.path = path

    def __fspath__(self) -> str | bytes:
        return self.path


def plan(machine: Machine, environ: dict[str, str] | None = None, **options: Any) -> Plan:
    return resolve(Request.of(options), environ or {}, machine)


def refusal(machine: Machine, environ: dict[str, str] | None = None, **options: Any) -> str:
    """The text of a refusal, whose three parts are all there."""
    with pytest.raises(RequestError) as caught:
        plan(machine, environ, **options)
    error = caught.value
    assert error.given
    assert error.fact
    assert error.advice
    assert str(error) == f"{error.given}: {error.fact}; {error.advice}"
    return str(error)


# -- the start method --------------------------------------------------------------------------

HELD = (1, 2, "gloo")
NOTEBOOK = {"interactive": "a notebook kernel", "script": (), "no_script": NO_SCRIPT}
LATER = {"earlier_calls": True}
FROZEN = {"script": (), "no_script": "a frozen program has no script to run again", "frozen": True}
PYTEST = {"script": (), "no_script": "pytest runs this, and would run its tests again"}

# What a person asked, the facts, the method, and a part of the reason. Rows stand in the order in
# which the rules of design section 3 are tried.
CHOICES: list[tuple[str, dict[str, Any], Machine, dict[str, str], str, str]] = [
    # An existing world comes first, whatever was asked.
    ("group", {}, cpus(group=HELD), {}, "attached", "already holds a process group"),
    ("group, spawn", {"strategy": "ddp_spawn"}, cpus(group=HELD), {}, "attached", "rank 1 of 2"),
    ("group, torchrun", {}, cpus(group=HELD), TORCHRUN, "attached", "already holds"),
    ("group, notebook", {"devices": 2}, cpus(group=HELD, **NOTEBOOK), {}, "attached", "already"),
    ("torchrun", {}, cpus(), TORCHRUN, "attached", "torchrun started"),
    ("torchrun, fork", {"start_method": "fork"}, cpus(), TORCHRUN, "attached", "torchrun"),
    ("torchrun, reexec", {"start_method": "reexec"}, cpus(), TORCHRUN, "attached", "torchrun"),
    ("torchrun, devices", {"devices": 2}, cpus(), TORCHRUN, "attached", "torchrun"),
    ("torchrun, notebook", {}, cpus(**NOTEBOOK), TORCHRUN, "attached", "torchrun"),
    # Then what was asked for.
    ("reexec", {"start_method": "reexec", "devices": 2}, cpus(), {}, "reexec", "asked for"),
    ("fork", {"start_method": "fork", "devices": 2}, cpus(), {}, "fork", "asked for"),
    ("server", {"start_method": "forkserver", "devices": 2}, cpus(), {}, "forkserver", "asked"),
    ("spawn", {"start_method": "spawn", "devices": 2}, cpus(), {}, "spawn", "asked for"),
    ("ddp_spawn", {"strategy": "ddp_spawn", "devices": 2}, cpus(), {}, "spawn", "asked for"),
    ("ddp_fork", {"strategy": "ddp_fork", "devices": 2}, cpus(), {}, "fork", "asked for"),
    ("ddp_notebook", {"strategy": "ddp_notebook", "devices": 2}, cpus(), {}, "fork", "asked"),
    ("ddp_server", {"strategy": "ddp_forkserver", "devices": 2}, cpus(), {}, "forkserver", "ask"),
    ("both agree", {"strategy": "ddp_fork", "start_method": "fork"}, cpus(), {}, "fork", "asked"),
    ("ddp leaves it", {"strategy": "ddp", "devices": 2}, cpus(), {}, "reexec", "first call"),
    ("ddp with spawn", {"strategy": "ddp", "start_method": "spawn"}, cpus(), {}, "spawn", "asked"),
    ("one, fork", {"start_method": "fork", "devices": 1}, cpus(), {}, "fork", "asked for"),
    ("one, spawn", {"start_method": "spawn", "devices": 1}, cpus(), {}, "spawn", "asked for"),
    ("fork, thread", {"start_method": "fork"}, cpus(main_thread=False), {}, "fork", "asked for"),
    ("spawn, notebook", {"start_method": "spawn"}, cpus(**NOTEBOOK), {}, "spawn", "asked for"),
    # One process needs no other.
    ("one", {"devices": 1}, cpus(), {}, "inline", "one process"),
    ("auto on a CPU", {}, cpus(), {}, "inline", "one process"),
    ("auto on one GPU", {}, gpus(1), {}, "inline", "one process"),
    ("one, notebook", {"devices": 1}, cpus(**NOTEBOOK), {}, "inline", "one process"),
    ("one, thread", {"devices": 1}, cpus(main_thread=False), {}, "inline", "one process"),
    # A frozen program has nothing but forks.
    ("frozen", {"devices": 2}, cpus(**FROZEN), {}, "fork", "a frozen program"),
    ("frozen, threads", {"devices": 2}, cpus(other_threads=True, **FROZEN), {}, "fork", "a frozen"),
    # Stray variables of a launcher are named.
    ("stray", {"devices": 2}, cpus(), {"RANK": "0"}, "reexec", "(RANK is set without LOCAL_RANK,"),
    ("stray, one", {}, cpus(), {"LOCAL_RANK": "0"}, "inline", "(LOCAL_RANK is set without RANK,"),
    ("address", {"devices": 2}, cpus(), {"MASTER_PORT": "1"}, "reexec", "can be run again"),
    # A notebook or a prompt forks, if it can.
    ("notebook", {"devices": 2}, cpus(**NOTEBOOK), {}, "fork", "a notebook kernel"),
    ("notebook, later", {"devices": 2}, cpus(**NOTEBOOK, **LATER), {}, "fork", "a notebook"),
    ("its threads", {"devices": 2}, cpus(other_threads=True, **NOTEBOOK), {}, "fork", "a notebook"),
    ("prompt of a script", {"devices": 2}, cpus(interactive="a prompt"), {}, "fork", "a prompt"),
    (
        "notebook, live GPU",
        {"devices": 2},
        gpus(live_accelerator="CUDA", **NOTEBOOK),
        {},
        "forkserver",
        "holds a CUDA context",
    ),
    (
        "notebook without fork",
        {"devices": 2},
        cpus(can_fork=False, **NOTEBOOK),
        {},
        "forkserver",
        "does not survive a fork",
    ),
    # A script, at its first call.
    ("script", {"devices": 2}, cpus(), {}, "reexec", "first call of a script"),
    ("script, all GPUs", {}, gpus(), {}, "reexec", "first call"),
    ("script, live GPU", {}, gpus(live_accelerator="CUDA"), {}, "reexec", "first call"),
    ("script, threads", {"devices": 2}, cpus(other_threads=True), {}, "reexec", "first call"),
    ("script without fork", {"devices": 2}, cpus(can_fork=False), {}, "reexec", "first call"),
    (
        "kept workers",
        {"devices": 2},
        cpus(earlier_calls=True, kept=(0, 1), kept_accelerator="cpu"),
        {},
        "reexec",
        "idle",
    ),
    (
        "kept workers, asked for",
        {"devices": 2, "start_method": "reexec"},
        cpus(earlier_calls=True, kept=(0, 1), kept_accelerator="cpu"),
        {},
        "reexec",
        "asked for",
    ),
    # Everything else.
    ("later", {"devices": 2}, cpus(**LATER), {}, "fork", "has made a distributed call before"),
    (
        "later, other size",
        {"devices": 3},
        cpus(earlier_calls=True, kept=(0, 1), kept_accelerator="cpu"),
        {},
        "fork",
        "whose workers are not those",
    ),
    (
        "later, other devices",
        {"devices": [2, 3]},
        gpus(earlier_calls=True, kept=(0, 1), kept_accelerator="cuda", live_accelerator="CUDA"),
        {},
        "forkserver",
        "whose workers are not those",
    ),
    (
        "later, other accelerator",
        {"devices": 2, "accelerator": "cpu"},
        gpus(earlier_calls=True, kept=(0, 1), kept_accelerator="cuda", live_accelerator="CUDA"),
        {},
        "forkserver",
        "whose workers are not those",
    ),
    (
        "later, threads",
        {"devices": 2},
        cpus(earlier_calls=True, other_threads=True),
        {},
        "forkserver",
        "other threads are running",
    ),
    (
        "later, live GPU",
        {},
        gpus(earlier_calls=True, live_accelerator="CUDA"),
        {},
        "forkserver",
        "CUDA context",
    ),
    (
        "later, no fork",
        {"devices": 2},
        cpus(earlier_calls=True, can_fork=False),
        {},
        "forkserver",
        "does not survive a fork",
    ),
    ("pytest", {"devices": 2}, cpus(**PYTEST), {}, "fork", "pytest runs this"),
    (
        "pytest, threads",
        {"devices": 2},
        cpus(other_threads=True, **PYTEST),
        {},
        "forkserver",
        "pytest runs this",
    ),
    ("-c", {"devices": 2}, cpus(script=(), no_script=NO_SCRIPT), {}, "fork", "no script on disk"),
    (
        "-c, live GPU",
        {"devices": 2},
        gpus(script=(), no_script=NO_SCRIPT, live_accelerator="CUDA"),
        {},
        "forkserver",
        "no script on disk",
    ),
    (
        "thread",
        {"devices": 2},
        cpus(main_thread=False, other_threads=True),
        {},
        "forkserver",
        "a thread other than the main one",
    ),
    (
        "thread, kept workers",  # signals, which free rank 0, are the main thread's
        {"devices": 2},
        cpus(
            main_thread=False,
            other_threads=True,
            earlier_calls=True,
            kept=(0, 1),
            kept_accelerator="cpu",
        ),
        {},
        "forkserver",
        "thread",
    ),
]


@pytest.mark.parametrize(
    ("asked", "machine", "environ", "method", "reason"),
    [pytest.param(*row[1:], id=row[0]) for row in CHOICES],
)
def test_start_method(
    asked: dict[str, Any], machine: Machine, environ: dict[str, str], method: str, reason: str
) -> None:
    chosen = plan(machine, environ, **asked)

    assert chosen.method == method
    assert reason in chosen.reason


def test_a_plan_is_a_function_of_its_three_arguments():
    environ = dict(TORCHRUN)
    machine, request = cpus(), Request(devices=2)

    assert resolve(request, environ, machine) == resolve(request, environ, machine)
    assert environ == TORCHRUN


def test_only_a_plan_for_reexec_holds_the_command():
    assert plan(cpus(), devices=2).command == SCRIPT
    assert plan(cpus(), devices=2, start_method="spawn").command == ()


# -- refusals: the start method ----------------------------------------------------------------


@pytest.mark.parametrize("option", ["strategy", "start_method"])
def test_fork_is_refused_where_a_context_is_alive(option: str):
    asked = {"strategy": "ddp_fork", "start_method": "fork"}[option]

    text = refusal(gpus(live_accelerator="CUDA"), **{option: asked})

    assert "already holds a CUDA context" in text
    assert '"forkserver"' in text


def test_fork_is_refused_where_the_platform_has_none():
    text = refusal(mac(), devices=2, accelerator="cpu", strategy="ddp_notebook")

    assert "no fork" in text
    assert '"spawn"' in text


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"script": (), "no_script": NO_SCRIPT}, NO_SCRIPT),
        (PYTEST, "pytest runs this"),
        ({"main_thread": False}, "a thread other than the main one"),
        ({"earlier_calls": True}, "has made a distributed call before"),
        (
            {"earlier_calls": True, "kept": (0, 1, 2), "kept_accelerator": "cpu"},
            "whose workers are not those",
        ),
        ({"interactive": "an interactive prompt"}, "an interactive prompt"),
    ],
)
def test_reexec_is_refused_where_it_is_impossible(facts: dict[str, Any], why: str):
    text = refusal(cpus(**facts), devices=2, start_method="reexec")

    assert "start method 'reexec'" in text
    assert why in text
    assert '"auto"' in text


def test_a_strategy_that_contradicts_the_start_method_is_refused():
    text = refusal(cpus(), strategy="ddp_spawn", start_method="fork")

    assert "strategy='ddp_spawn' with start_method='fork'" in text
    assert "'spawn'" in text


@pytest.mark.parametrize(
    ("option", "value", "near"),
    [
        ("strategy", "dpp", "ddp"),
        ("strategy", "ddp_forkserve", "ddp_forkserver"),
        ("start_method", "spwan", "spawn"),
        ("start_method", "fork_server", "forkserver"),
        ("accelerator", "cudda", "cuda"),
        ("returns", "al", "all"),
    ],
)
def test_a_misspelled_word_is_refused_with_the_right_one(option: str, value: str, near: str):
    text = refusal(gpus(), **{option: value})

    assert f"{option}={value!r}" in text
    assert f"did you mean {near!r}?" in text


@pytest.mark.parametrize("option", ["strategy", "start_method", "accelerator", "returns"])
@pytest.mark.parametrize("value", ["zzz", 3, None, ["ddp"]])
def test_an_unknown_word_is_refused_with_all_there_are(option: str, value: object):
    text = refusal(gpus(), **{option: value})

    assert f"{option}={value!r}" in text
    assert "there are" in text


# -- output ------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["all", "main", "none"])
def test_output_is_a_word(word: str):
    assert plan(cpus(), devices=2, output=word).output == word


@pytest.mark.parametrize(
    "asked",
    [Path("logs"), PurePath("none"), Entry("logs"), Entry(b"logs"), "./logs", "/a/b", "all/"],
)
def test_output_is_a_directory(asked: Any):
    """A path object, or text that cannot be a word."""
    assert plan(cpus(), devices=2, output=asked).output == PurePath(os.fsdecode(asked))


def test_output_is_a_directory_that_is_there():
    """Its name alone will do, also if it is like a word; the three words are what they are."""
    machine = cpus(output_exists=True)

    assert plan(machine, devices=2, output="logs").output == PurePath("logs")
    assert plan(machine, devices=2, output="mian").output == PurePath("mian")
    assert plan(machine, devices=2, output="none").output == "none"


@pytest.mark.parametrize(("asked", "near"), [("mian", "main"), ("alll", "all"), ("non", "none")])
def test_a_misspelled_output_is_no_directory(asked: str, near: str):
    text = refusal(cpus(), devices=2, output=asked)

    assert f"output={asked!r}" in text
    assert f"did you mean {near!r}?" in text


def test_a_name_that_is_not_there_is_no_directory():
    text = refusal(cpus(), devices=2, output="logs")

    assert "no directory of that name" in text
    assert "'./logs'" in text


@pytest.mark.parametrize("asked", [3, None, True, ["all"], "", b"logs"])
def test_what_is_neither_word_nor_path_is_refused(asked: object):
    assert "there are 'all', 'main', 'none'" in refusal(cpus(), devices=2, output=asked)


@pytest.mark.parametrize(
    ("machine", "options", "forwarded"),
    [
        (cpus(), {"devices": 3}, [1, 2]),  # re-exec: the caller is rank 0
        (cpus(**LATER), {"devices": 2}, [0, 1]),
        (cpus(**NOTEBOOK), {"devices": 2}, [0, 1]),
        (cpus(), {"devices": 1}, []),
        (cpus(), {"devices": 1, "start_method": "spawn"}, [0]),
        (cpus(group=(0, 1, "gloo")), {}, []),
    ],
)
def test_the_ranks_that_are_forwarded_are_those_beside_the_caller(
    machine: Machine, options: dict[str, Any], forwarded: list[int]
):
    chosen = plan(machine, output="./logs", **options)

    assert list(chosen.forwarded) == forwarded
    assert ("rank 0 is the caller" in str(chosen)) == (0 not in forwarded)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("all", None),
        ("main", "output        of rank 0"),
        ("none", "output        of no rank"),
        ("a/b/", "output        in a/b/rank-N.log, N the rank"),
    ],
)
def test_a_plan_says_what_becomes_of_the_output(asked: str, line: str | None):
    found = str(plan(cpus(**LATER), devices=2, output=asked)).splitlines()

    assert [one for one in found if one.startswith("output")] == [line] * (line is not None)


@pytest.mark.parametrize("asked", ["main", "none", "./logs"])
@pytest.mark.parametrize(
    ("machine", "environ", "fact"),
    [
        (cpus(), TORCHRUN, "torchrun started this rank"),
        (cpus(group=HELD), {}, "a group that it holds"),
    ],
)
def test_output_that_is_not_ours_is_refused(
    machine: Machine, environ: dict[str, str], fact: str, asked: str
):
    assert fact in refusal(machine, environ, output=asked)
    assert plan(machine, environ, output="all").method == "attached"


@pytest.mark.parametrize("asked", ["main", "none", "./logs"])
def test_in_a_world_of_one_any_output_is_fine(asked: str):
    alone = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}

    assert plan(cpus(), alone, output=asked).method == "attached"
    assert plan(cpus(), output=asked).method == "inline"


# -- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("auto", (0, 1, 2, 3)),
        (1, (0,)),
        (3, (0, 1, 2)),
        ([2, 3], (2, 3)),
        ((3, 1), (3, 1)),
        (range(1, 3), (1, 2)),
        (numpy.int64(2), (0, 1)),
        ([numpy.int64(2), 0], (2, 0)),
    ],
)
def test_devices_of_an_accelerator(asked: Any, found: tuple[int, ...]):
    chosen = plan(gpus(), devices=asked)

    assert chosen.accelerator == "cuda"
    assert chosen.devices == found
    assert chosen.world_size == len(found)


@pytest.mark.parametrize(("asked", "size"), [("auto", 1), (1, 1), (5, 5), ([3, 7], 2)])
def test_a_cpu_has_as_many_devices_as_are_asked_for(asked: Any, size: int):
    chosen = plan(cpus(), devices=asked)

    assert chosen.accelerator == "cpu"
    assert chosen.world_size == len(chosen.devices) == size


@pytest.mark.parametrize(
    "asked", [0, -1, True, False, "2", "all", [], [0, 0], [-1], [0.0], [True], 1.0, None, {0: 1}]
)
def test_devices_that_make_no_sense_are_refused(asked: object):
    text = refusal(gpus(), devices=asked)

    assert f"devices={asked!r}" in text
    assert "a number such as 2" in text


@pytest.mark.parametrize("asked", [5, [4], [0, 9]])
def test_more_devices_than_there_are_are_refused(asked: Any):
    text = refusal(gpus(4), devices=asked)

    assert f"devices={asked!r}" in text
    assert "this machine has 4 cuda device(s)" in text
    assert "accelerator='cpu'" in text


def test_more_devices_than_there_are_is_no_matter_on_the_cpu():
    chosen = plan(gpus(4), devices=6, accelerator="cpu")

    assert (chosen.accelerator, chosen.world_size, chosen.backend) == ("cpu", 6, "gloo")


# -- accelerator and backend -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "asked", "found"),
    [
        (cpus(), "auto", "cpu"),
        (cpus(), "cpu", "cpu"),
        (gpus(), "auto", "cuda"),
        (gpus(), "cuda", "cuda"),
        (gpus(), "gpu", "cuda"),
        (gpus(), "cpu", "cpu"),
        (mac(), "auto", "mps"),
        (mac(), "gpu", "mps"),
        (mac(), "cpu", "cpu"),
    ],
)
def test_accelerator(machine: Machine, asked: str, found: str):
    assert plan(machine, accelerator=asked).accelerator == found


@pytest.mark.parametrize("asked", ["cuda", "gpu", "mps", "xpu"])
def test_an_absent_accelerator_is_refused(asked: str):
    text = refusal(cpus(), accelerator=asked)

    assert f"accelerator={asked!r}" in text
    assert "no accelerator" in text
    assert '"cpu"' in text


def test_another_accelerator_than_the_present_one_is_refused():
    assert "torch finds cuda" in refusal(gpus(), accelerator="xpu")


def test_mps_is_one_device_without_a_group():
    chosen = plan(mac())

    assert (chosen.accelerator, chosen.devices, chosen.method) == ("mps", (0,), "inline")


def test_more_processes_than_mps_has_run_on_the_cpu():
    chosen = plan(mac(), devices=2)

    assert (chosen.accelerator, chosen.world_size, chosen.backend) == ("cpu", 2, "gloo")


def test_two_devices_of_mps_are_refused():
    text = refusal(mac(), devices=2, accelerator="mps")

    assert "devices=2" in text
    assert "accelerator='cpu'" in text


@pytest.mark.parametrize(
    ("machine", "asked", "found"),
    [
        (cpus(), "auto", "gloo"),
        (gpus(), "auto", "nccl"),
        (mac(), "auto", "gloo"),
        (gpus(), "gloo", "gloo"),
        (gpus(), "NCCL", "nccl"),
        (gpus(), "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
    ],
)
def test_backend(machine: Machine, asked: str, found: str):
    assert plan(machine, backend=asked).backend == found


@pytest.mark.parametrize("asked", ["glo", "nccl", "cpu:gloo,cuda:nccl", "", "cpu:", None, 3])
def test_a_backend_that_torch_does_not_have_is_refused(asked: object):
    text = refusal(cpus(), backend=asked)

    assert f"backend={asked!r}" in text
    assert "gloo" in text


# -- nodes and other launchers -----------------------------------------------------------------


def test_nodes_without_a_launcher_are_refused_with_the_command():
    text = refusal(gpus(), num_nodes=2)

    assert "num_nodes=2" in text
    assert "torchrun --nnodes 2 --nproc-per-node 4" in text


@pytest.mark.parametrize("asked", [0, -1, True, 1.5, "2", None])
def test_a_number_of_nodes_that_makes_no_sense_is_refused(asked: object):
    assert f"num_nodes={asked!r}" in refusal(cpus(), num_nodes=asked)


def test_the_world_of_torchrun_is_taken_as_it_is():
    chosen = plan(cpus(), TWO_NODES)

    assert (chosen.world_size, chosen.num_nodes) == (4, 2)
    assert chosen.external is not None
    assert (chosen.external.rank, chosen.external.local_rank) == (1, 1)


@pytest.mark.parametrize("options", [{"devices": 2}, {"num_nodes": 2}, {"devices": [0, 1]}])
def test_what_is_true_of_the_world_of_torchrun_may_be_said(options: dict[str, Any]):
    assert plan(cpus(), TWO_NODES, **options).world_size == 4


def test_other_devices_than_torchrun_started_are_refused():
    text = refusal(cpus(), TORCHRUN, devices=4)

    assert "devices=4" in text
    assert "torchrun started 2 processes on this node" in text
    assert "devices=2" in text


def test_other_nodes_than_torchrun_started_are_refused():
    text = refusal(cpus(), TWO_NODES, num_nodes=3)

    assert "num_nodes=3" in text
    assert "torchrun started 2 node(s)" in text


def test_a_launcher_may_show_each_process_its_own_device_only():
    chosen = plan(gpus(1), TORCHRUN, devices=2)

    assert (chosen.method, chosen.world_size) == ("attached", 2)


def test_a_group_that_is_held_gives_size_and_backend():
    chosen = plan(gpus(group=(0, 3, "gloo")))

    assert (chosen.world_size, chosen.backend) == (3, "gloo")


def test_other_devices_than_a_held_group_has_are_refused():
    text = refusal(cpus(group=(0, 2, "gloo")), devices=3)

    assert "devices=3" in text
    assert "has 2 ranks" in text


def test_devices_are_those_of_a_node_when_the_group_of_torchrun_is_held():
    """The same request means the same whether the script made the group itself or not."""
    held = cpus(group=(1, 4, "gloo"))

    assert plan(held, TWO_NODES, devices=2).num_nodes == 2
    assert plan(held, TWO_NODES, devices=2, num_nodes=2).world_size == 4


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["timeout", "rendezvous_timeout", "grace"])
def test_a_duration_is_a_number_or_a_timedelta(option: str):
    assert getattr(plan(cpus(), **{option: 3}), option) == 3.0
    assert getattr(plan(cpus(), **{option: timedelta(minutes=2)}), option) == 120.0


@pytest.mark.parametrize("option", ["timeout", "rendezvous_timeout", "grace"])
@pytest.mark.parametrize("value", [-1, "30", True, math.nan, timedelta(seconds=-1), [1]])
def test_a_duration_that_makes_no_sense_is_refused(option: str, value: object):
    assert f"{option}={value!r}" in refusal(cpus(), **{option: value})


@pytest.mark.parametrize("option", ["timeout", "rendezvous_timeout"])
def test_no_time_at_all_is_refused(option: str):
    assert f"{option}=0" in refusal(cpus(), **{option: 0})


def test_a_failed_world_may_have_no_grace():
    assert plan(cpus(), grace=0).grace == 0.0


@pytest.mark.parametrize("option", ["rendezvous_timeout", "grace"])
def test_only_a_collective_may_take_torchs_own_time(option: str):
    assert plan(cpus(), timeout=None).timeout is None
    assert f"{option}=None" in refusal(cpus(), **{option: None})


@pytest.mark.parametrize("option", ["timeout", "rendezvous_timeout"])
def test_an_endless_duration_is_refused_or_can_be_given_to_torch(option: str):
    """torch takes a timedelta, which has no infinity."""
    try:
        chosen = plan(cpus(), **{option: math.inf})
    except RequestError:
        return

    timedelta(seconds=getattr(chosen, option))


@pytest.mark.parametrize("value", [0, 7, 2**63 - 1, None])
def test_seed(value: int | None):
    assert plan(cpus(), seed=value).seed == value


def test_numbers_of_numpy_are_numbers():
    """A search draws them."""
    chosen = plan(cpus(), seed=numpy.int64(7), deadline=numpy.int64(5), max_restarts=numpy.int8(2))

    found = (chosen.seed, chosen.deadline, chosen.max_restarts)
    assert found == (7, 5.0, 2)
    assert [type(one) for one in found] == [int, float, int]


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, "7", True])
def test_a_seed_that_makes_no_sense_is_refused(value: object):
    assert f"seed={value!r}" in refusal(cpus(), seed=value)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
def test_write_back(value: bool, devices: int):
    chosen = plan(cpus(), write_back=value, devices=devices)

    assert chosen.write_back is value
    assert ("stays as it is in the caller" in str(chosen)) is not value


@pytest.mark.parametrize("value", [True, False])
def test_check_collectives(value: bool):
    chosen = plan(cpus(), check_collectives=value, devices=2)

    assert chosen.check_collectives is value
    assert ("are not checked" in str(chosen)) is not value
    assert "check_collectives=None: it is True or False" in refusal(cpus(), check_collectives=None)


@pytest.mark.parametrize("value", [None, 0, 1, "no"])
def test_a_write_back_that_is_neither_true_nor_false_is_refused(value: object):
    assert f"write_back={value!r}: it is True or False" in refusal(cpus(), write_back=value)


@pytest.mark.parametrize("value", ["main", "all"])
def test_returns(value: str):
    assert plan(cpus(), returns=value).returns == value


# -- options -----------------------------------------------------------------------------------


def test_an_unknown_option_is_a_type_error_with_the_right_one():
    with pytest.raises(TypeError, match="'device' is not an option: did you mean 'devices'"):
        Request.of({"device": 2})


def test_an_option_like_no_other_is_a_type_error_with_all_there_are():
    with pytest.raises(TypeError) as caught:
        Request.of({"qqq": 2})

    for name in [one.name for one in dataclasses.fields(Request)]:
        assert name in str(caught.value)


def test_options_have_the_documented_defaults():
    chosen = plan(cpus())

    assert (chosen.timeout, chosen.rendezvous_timeout, chosen.grace) == (None, 120.0, 5.0)
    assert (chosen.returns, chosen.seed, chosen.num_nodes) == ("main", None, 1)
    assert chosen.write_back is True
    assert chosen.check_collectives is True


# -- the printed plan --------------------------------------------------------------------------


def test_a_plan_shows_what_will_happen():
    text = str(plan(gpus(script=(*SCRIPT, "two words")), devices=[2, 3]))

    assert re.search(r"^start method +reexec: the first call of a script", text, re.M)
    assert re.search(r"^world +2 ranks on 1 node\(s\), backend nccl$", text, re.M)
    assert re.search(r"^devices +rank 0 on cuda:2, rank 1 on cuda:3$", text, re.M)
    assert re.search(r"^command +/usr/bin/python train.py 'two words'$", text, re.M)
    assert re.search(r"^environment .*WORLD_SIZE=2 .*OMP_NUM_THREADS=4", text, re.M)


def test_a_plan_shows_the_variables_that_workers_get():
    shown = set(re.findall(r"([A-Z_]+)=", str(plan(cpus(), devices=2))))

    assert shown == set(worker_environ({}, 0, 2, 1, 4)) - {
        "DISTRIBUTE_WORKER",
        "GLOO_SOCKET_IFNAME",
    }


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (plan(cpus()), ["inline", "rank 0 on cpu", "no process group"]),
        (plan(cpus(), TORCHRUN), ["attached: torchrun", "one of cpu for each process"]),
        (plan(mac()), ["inline", "rank 0 on mps"]),
    ],
)
def test_a_plan_that_starts_nothing_shows_neither_command_nor_environment(
    chosen: Plan, words: list[str]
):
    text = str(chosen)

    assert all(word in text for word in words)
    assert "command" not in text
    assert "MASTER_PORT" not in text


@pytest.mark.parametrize(("method", "takes"), [("reexec", 57), ("fork", 35), ("spawn", 35)])
def test_a_world_that_this_process_has_no_descriptors_for_is_refused(
    method: str, takes: int
) -> None:
    asked: dict[str, Any] = {"devices": 4, "start_method": method}
    assert resolve(Request(**asked), {}, cpus(open_files=takes)).method == method
    with pytest.raises(RequestError, match=f"up to {takes} .* open {takes - 1} more"):
        resolve(Request(**asked), {}, cpus(open_files=takes - 1))
    resolve(Request(devices=1), {}, cpus(open_files=0))
    # Workers that are there already have theirs.
    idle = cpus(open_files=0, kept=(0, 1, 2, 3), kept_accelerator="cpu")
    assert resolve(Request(devices=4), {}, idle).method == "reexec"


def test_a_call_from_a_directory_that_is_gone_is_refused() -> None:
    gone = cpus(working_directory=False)
    with pytest.raises(RequestError, match=r"os\.chdir"):
        resolve(Request(devices=2), {}, gone)
    assert resolve(Request(devices=1), {}, gone).method == "inline"
