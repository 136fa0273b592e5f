"""How ranks meet: a listening socket bound before anybody starts, a store on it, a group by call.

The launcher binds the port and hands the listening socket to rank 0, so the port cannot be taken
by somebody else between its choice and its use. The server of the store is an object of its own:
dropping it frees whoever waits in the store, which nothing else does.
"""

from __future__ import annotations

import gc
import importlib
import socket
import sys
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

from distribute import threads

LOOPBACK = "127.0.0.1"
_GLOO_THREADS = "pt_gloo_runloop"

# Long enough for the threads of a failed gloo group to have nothing left to do. The destructor
# joins them while it holds the interpreter's lock, which a busy one would need: for ever.
_IDLE_SECONDS = 0.05
# After this ranks that have not left yet may be waiting for one that has.
MOMENT = 0.05


def listen() -> socket.socket:
    """Binds a free port of the loopback interface and listens on it."""
    listening = socket.socket()
    listening.bind((LOOPBACK, 0))
    listening.listen(1024)
    return listening


class Rendezvous:
    """A rank's connection to the store of its world.

    Args:
        host: Address of the store.
        port: Its port.
        server: Whether this process hosts it.
        listening: Descriptor of the bound socket that the server takes over, or None to bind.
        timeout: Seconds to wait for the server and for the keys of others.
    """

    def __init__(
        self, host: str, port: int, *, server: bool, listening: int | None, timeout: float
    ) -> None:
        from torch._C._distributed_c10d import TCPStore

        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False}
        if server:
            given: dict[str, Any] = {} if listening is None else {"master_listen_fd": listening}
            self._server: TCPStore | None = TCPStore(host, port, is_master=True, **given, **options)
        else:
            self._server = None
        self._store = TCPStore(host, port, is_master=False, **options)

    def announce(self, key: str, rank: int) -> None:
        """Says that a rank has come."""
        self._store.set(f"{key}/{rank}", "")

    def missing(self, key: str, world_size: int) -> list[int]:
        """Returns the ranks that have not come."""
        return [one for one in range(world_size) if not self._store.check([f"{key}/{one}"])]

    def join(
        self,
        key: str,
        *,
        backend: str,
        rank: int,
        world_size: int,
        timeout: float | None,
        device: torch.device,
    ) -> None:
        """Makes the default process group of one call.

        Args:
            key: Name of the call; the same on all ranks and never used before in this world.
            backend: torch's process-group backend.
            rank: This rank.
            world_size: Number of ranks.
            timeout: Seconds a collective may take, or None for torch's default.
            device: The rank's device.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        # A first DDP model imports it: with a group there, its functions would have that as their
        # default, which keeps the connections for as long as the process lives.
        importlib.import_module("torch.distributed.nn.functional")
        given: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
        if device.type == "cuda":
            given["device_id"] = device
        # torch puts its own in this place, which marks the lines of tracebacks with the rank.
        hook = sys.excepthook
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore(key, self._store),
                rank=rank,
                world_size=world_size,
                **given,
            )
        finally:
            sys.excepthook = hook
        hold_groups()

    def drop_server(self) -> None:
        """Ends the store, if this process hosts it; every wait in it raises at once."""
        self._server = None


def only_group() -> bool:
    """Tells whether the groups of this library exist and no other: the user has changed nothing."""
    import torch.distributed as dist

    groups = [one for one in dist.distributed_c10d._world.pg_map if one not in _adopted]
    return len(groups) == 1 and any(one is groups[0] for one in _held)


def leave(*, failed: bool) -> None:
    """Destroys the process groups of this process, if it has any.

    Args:
        failed: Whether operations may have been cut off; then our own references are the last to
            die, outside the user's frames and after the groups' threads have come to rest.
    """
    import torch.distributed as dist

    hold_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    if failed and _held:
        time.sleep(_IDLE_SECONDS)
    if _held:
        # Models may hold the group, and with it its threads, for as long as the process lives.
        threads.rest(_GLOO_THREADS)
    if not failed:
        _left.update(_held)
    _held.clear()


def left() -> bool:
    """Tells whether groups that were left still have their connections."""
    return len(_left) > 0


def free_others() -> None:
    """Closes the connections of groups that were left, which fails whoever waits in them.

    Nothing else would until its timeout: a DDP model holds its group, and is garbage in cycles.
    One that the user has kept holds it on.
    """
    if left():
        gc.collect()
        _left.clear()


# References to the process groups of the running call. The user's function may drop or destroy
# them at any moment; none of its frames is to hold the last reference to one.
_held: list[Any] = []


# Groups that were left and that something else still holds, with their connections.
_left: weakref.WeakSet[Any] = weakref.WeakSet()


# Groups besides the joined one that this library has made, and may find in the next call.
_adopted: weakref.WeakSet[Any] = weakref.WeakSet()


def adopt(group: Any) -> None:
    """Notes a group of all ranks that this library has made."""
    _adopted.add(group)


def hold_groups() -> None:
    """Keeps the process groups that exist now alive until `leave`."""
    import torch.distributed as dist

    _held.extend(dist.distributed_c10d._world.pg_map)
