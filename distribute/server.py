"""The fork server: a process that has imported torch and forks workers on request.

It does nothing else, so it has no threads and no accelerator context, and a fork of it is safe.
It is the parent of the workers, so it also reports their ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import traceback
from dataclasses import dataclass
from typing import NoReturn

from distribute import forked, worker
from distribute.channel import Channel, own_fork
from distribute.link import WatchedLink
from distribute.messages import Ready
from distribute.place import Place
from distribute.process import reap


@dataclass(frozen=True)
class Order:
    """To the server: make a worker.

    Its descriptors are the three of the worker's channel, the pipe for its exit status, its three
    standard streams, and for rank 0 the listening socket of the rendezvous.
    """

    place: Place
    group: bool


def main(descriptor: int, life: int, record: int) -> NoReturn:
    """Is the program of the fork server."""
    channel = Channel.inherited(descriptor, life, record)
    forked.preload()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how workers end
    channel.send(None)
    _Serving(channel).run()


class _Serving:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._serving = True
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[int, int, bool]] = {}  # pid: pidfd, status pipe, group

    def run(self) -> NoReturn:
        self._selector.register(self._channel, selectors.EVENT_READ, None)
        # Until the launcher has hung up and no worker of it is left.
        while self._serving or self._children:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._serve()
                else:
                    self._bury(key.data)
        os._exit(0)

    def _serve(self) -> None:
        try:
            order, descriptors = self._channel.receive_with()
        except EOFError:
            self._serving = False
            self._selector.unregister(self._channel)
            return
        pid = self._fork(order, descriptors)
        status = descriptors.pop(3)
        for one in descriptors:
            os.close(one)
        pidfd = os.pidfd_open(pid)
        self._children[pid] = pidfd, status, order.group
        self._selector.register(pidfd, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):
            self._channel.send(pid)

    def _fork(self, order: Order, descriptors: list[int]) -> int:
        with own_fork():
            pid = os.fork()
        if pid == 0:
            _child(order, descriptors, self)
        return pid

    def _bury(self, pid: int) -> None:
        pidfd, status, group = self._children.pop(pid)
        code = reap(pid, group=group)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        try:
            os.write(status, str(code).encode())
        except OSError:
            pass  # the launcher no longer wants to know
        os.close(status)

    def forget(self) -> None:
        """Closes, in a child, what belongs to the server."""
        self._selector.close()
        for pidfd, status, _ in self._children.values():
            os.close(pidfd)
            os.close(status)


def _child(order: Order, descriptors: list[int], serving: _Serving) -> NoReturn:
    try:
        serving.forget()
        channel = Channel.inherited(*descriptors[:3])
        channel.keep_only()
        os.close(descriptors[3])
        for number, one in enumerate(descriptors[4:7]):
            os.dup2(one, number)
            os.close(one)
        listening = descriptors[7] if len(descriptors) > 7 else None
        forked.enter(order.place, channel, group=order.group)
        link = WatchedLink(channel, group=order.group)
        worker.serve(link, worker.Seat(order.place, listening), ready=Ready(order.place.rank))
    except BaseException:
        traceback.print_exc()
        worker.flush()
    finally:
        os._exit(1)
