"""Runs a function on real ranks: forked processes that share a gloo group.

    parent                         rank 0            rank 1 ...
    bind a socket, fork            hosts the store   joins it
    read one outcome per pipe  <-  (ok, value) or (failed, traceback)
    close the release pipe     ->  leave by os._exit, the store last

A fork takes 0.1 s per world because everything that is slow to import is imported here.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import selectors
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any, NoReturn

import torch
import torch._dynamo  # DDP's constructor would import it in every rank
import torch.distributed as dist
import torch.nn.parallel

from distribute import rendezvous
from distribute.world import World

# How long the others may go on once a rank has failed: they may be waiting for it.
_AFTER_FAILURE = 2.0


def alone() -> World:
    """A world of one without a process group."""
    return _world(0, 1, grouped=False)


def on_ranks(world_size: int, fn: Callable[[World], Any], timeout: float = 300) -> list[Any]:
    """Calls `fn(world)` on every rank of a new world and returns the values in rank order.

    Raises AssertionError with the tracebacks of the ranks that raised, and the stacks of those
    that gave no value before the timeout. No process is left behind.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=world_size)
    release, hold = os.pipe()
    pids: list[int] = []
    pipes: list[int] = []
    with ExitStack() as files:
        stacks = [files.enter_context(tempfile.TemporaryFile()) for _ in range(world_size)]
        try:
            for rank in range(world_size):
                reader, writer = os.pipe()
                pid = _fork()
                if pid == 0:
                    os.close(hold)
                    faulthandler.register(signal.SIGUSR1, file=stacks[rank])
                    _be_rank(fn, _world(rank, world_size), listener, writer, release)
                os.close(writer)
                pids.append(pid)
                pipes.append(reader)
            outcomes = _read_all(pipes, timeout)
        finally:
            listener.close()
            os.close(release)
            os.close(hold)
            _end(pids)
            for reader in pipes:
                os.close(reader)
        return _values(outcomes, stacks)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads; see _be_rank
        return os.fork()


def _world(rank: int, world_size: int, *, grouped: bool = True) -> World:
    return World(
        rank=rank,
        local_rank=rank,
        node_rank=0,
        world_size=world_size,
        local_world_size=world_size,
        num_nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
        seed=0,
        grouped=grouped,
    )


def _be_rank(
    fn: Callable[[World], Any],
    world: World,
    listener: socket.socket,
    writer: int,
    release: int,
) -> NoReturn:
    try:
        torch.set_num_threads(1)  # the parent's OpenMP threads do not exist in a fork
        store = _join(world, listener)
        try:
            outcome = (True, fn(world))
            message = pickle.dumps(outcome)
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        _write(writer, message)
        os.close(writer)
        os.read(release, 1)  # ends when the parent has every outcome or is gone
        del store
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _join(world: World, listener: socket.socket) -> dist.TCPStore:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    port = listener.getsockname()[1]
    if world.rank == 0:
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            world.world_size,
            is_master=True,
            master_listen_fd=listener.detach(),
            wait_for_workers=False,
        )
    else:
        listener.close()
        store = dist.TCPStore("127.0.0.1", port, world.world_size, is_master=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("t", store),
        rank=world.rank,
        world_size=world.world_size,
    )
    # As in a call: whoever drops the last reference to a group may wait for its threads for ever.
    rendezvous.hold_groups()
    return store


def _write(descriptor: int, message: bytes) -> None:
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_all(pipes: list[int], timeout: float) -> list[tuple[bool, Any] | None]:
    """Reads until every rank has closed its pipe or time is up; None for a rank without value."""
    received = {reader: bytearray() for reader in pipes}
    outcomes: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for reader in pipes:
            selector.register(reader, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 1 << 16)
                received[key.fd] += chunk
                if chunk:
                    continue
                selector.unregister(key.fd)
                if received[key.fd]:
                    outcomes[key.fd] = pickle.loads(received[key.fd])
                if not outcomes.get(key.fd, (False, None))[0]:
                    deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)
    return [outcomes.get(reader) for reader in pipes]


def _end(pids: list[int]) -> None:
    """Reaps the ranks; those that do not leave by themselves are made to, and show their stacks."""
    patience = {signal.SIGUSR1: 1.0, signal.SIGKILL: 0.3}
    waiting = set(pids)
    for signum, seconds in patience.items():
        deadline = time.monotonic() + seconds
        while waiting and time.monotonic() < deadline:
            waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.002)
        for pid in waiting:
            os.kill(pid, signum)
    for pid in waiting:
        os.waitpid(pid, 0)


def _values(outcomes: list[tuple[bool, Any] | None], stacks: list[IO[bytes]]) -> list[Any]:
    reports: list[str] = []
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            stacks[rank].seek(0)
            text = stacks[rank].read().decode() or "it had left by itself"
            reports.append(f"rank {rank} gave no value\n{text}")
        elif not outcome[0]:
            reports.append(f"rank {rank} raised\n{outcome[1]}")
    if reports:
        raise AssertionError("\n".join(reports))
    return [outcome[1] for outcome in outcomes if outcome is not None]
