"""The control channel: whole messages, descriptors, and an end that is noticed at once."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from distribute.channel import Channel, own_fork
from distribute.payload import Payload, pack


@dataclass
class Message:
    text: str
    payload: Payload | None = None


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def fork(child: Callable[[], Any]) -> int:
    """Forks; the child calls the function and leaves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    return pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def readable(channel: Channel, seconds: float = 60.0) -> bool:
    return bool(select.select([channel], [], [], seconds)[0])


# -- messages ----------------------------------------------------------------------------------


def test_messages_arrive_whole_and_in_order(pair: tuple[Channel, Channel]):
    ours, theirs = pair
    for number in range(20):
        ours.send({"number": number, "text": "x" * number * 100})
    theirs.send(None)

    received = [theirs.receive() for _ in range(20)]

    assert received == [{"number": n, "text": "x" * n * 100} for n in range(20)]
    assert ours.receive() is None


def test_a_message_may_be_larger_than_the_sockets_buffer(pair: tuple[Channel, Channel]):
    ours, theirs = pair
    large = os.urandom(3 << 20)
    sender = threading.Thread(target=ours.send, args=[large])
    sender.start()

    received = theirs.receive()
    sender.join()

    assert received == large


def test_an_end_is_readable_when_a_message_is_there(pair: tuple[Channel, Channel]):
    ours, theirs = pair

    assert not readable(theirs, 0)
    ours.send("x")
    assert readable(theirs)


# -- descriptors -------------------------------------------------------------------------------


def test_a_large_payload_travels_as_a_descriptor(pair: tuple[Channel, Channel]):
    ours, theirs = pair
    text = "x" * 500_000
    sent = Message("large", pack(text))
    assert sent.payload is not None
    assert sent.payload.files

    ours.send(sent)
    sent.payload.close()
    received = theirs.receive()

    assert (received.text, received.payload.load()) == ("large", text)
    received.payload.close()


def test_every_receiver_has_a_descriptor_of_its_own():
    payload = pack(b"x" * 500_000)
    values = []
    for _ in range(3):
        ours, theirs = Channel.pair()
        ours.send(Message("", payload))
        received = theirs.receive()
        values.append(received.payload.load())
        received.payload.close()
        ours.close()
        theirs.close()

    assert values == [b"x" * 500_000] * 3
    assert payload.load() == values[0]
    payload.close()


def test_a_small_payload_needs_no_descriptor(pair: tuple[Channel, Channel]):
    ours, theirs = pair

    ours.send(Message("small", pack([1, 2, 3])))
    received = theirs.receive()

    assert not received.payload.files
    assert received.payload.load() == [1, 2, 3]


def received_files(pair: tuple[Channel, Channel]) -> tuple[Any, list[bool]]:
    """What arrives with six files: their identities, and whether programs would inherit them."""
    ours, theirs = pair
    files = [os.memfd_create(f"file-{number}") for number in range(6)]
    ours.send_with([os.fstat(one).st_ino for one in files], files)
    for one in files:
        os.close(one)
    expected, received = theirs.receive_with()
    same = [os.fstat(one).st_ino for one in received] == expected
    inheritable = [os.get_inheritable(one) for one in received]
    for one in received:
        os.close(one)
    return same, inheritable


def test_descriptors_keep_their_order(pair: tuple[Channel, Channel]):
    same, _ = received_files(pair)

    assert same


def test_what_a_rank_starts_does_not_inherit_the_descriptors_it_received(
    pair: tuple[Channel, Channel],
):
    _, inheritable = received_files(pair)

    assert inheritable == [False] * 6


# -- the end -----------------------------------------------------------------------------------


def test_the_end_follows_what_was_sent_before_it(pair: tuple[Channel, Channel]):
    ours, theirs = pair
    theirs.send("last words")
    theirs.close()

    assert ours.receive() == "last words"
    with pytest.raises(EOFError):
        ours.receive()


def test_the_end_is_an_end_when_something_was_left_unread(pair: tuple[Channel, Channel]):
    ours, theirs = pair
    ours.send("never read")
    theirs.close()

    with pytest.raises(EOFError):
        ours.receive()


def test_a_message_that_was_cut_off_is_an_end(pair: tuple[Channel, Channel]):
    ours, theirs = pair
    os.write(ours.fileno(), b"\0" * 7 + b"\x64" + b"\0" + b"only a part")
    ours.close()

    with pytest.raises(EOFError):
        theirs.receive()


def test_sending_to_nobody_is_an_error(pair: tuple[Channel, Channel]):
    ours, theirs = pair
    theirs.close()

    with pytest.raises(OSError, match="Broken pipe"):
        ours.send("x")


def test_a_closed_end_has_no_descriptor(pair: tuple[Channel, Channel]):
    ours, _ = pair
    ours.close()

    assert ours.fileno() == -1


def test_an_end_is_taken_over_by_its_descriptors(pair: tuple[Channel, Channel]):
    ours, theirs = pair
    numbers = [os.dup(one) for one in theirs.descriptors]
    for one in numbers:
        os.set_inheritable(one, True)
    theirs.close()

    again = Channel.inherited(*numbers)
    ours.send("x")

    assert again.descriptors == tuple(numbers)
    assert not any(os.get_inheritable(one) for one in numbers)
    assert again.receive() == "x"
    again.close()
    with pytest.raises(EOFError):
        ours.receive()


def test_the_death_of_a_process_is_the_end_of_its_channel(pair: tuple[Channel, Channel]):
    ours, theirs = pair

    def child() -> None:
        theirs.keep_only()
        theirs.send("ready")
        time.sleep(600)

    with own_fork():
        pid = fork(child)
    theirs.close()
    assert ours.receive() == "ready"
    assert not readable(ours, 0)

    end(pid)

    assert readable(ours)
    with pytest.raises(EOFError):
        ours.receive()


def test_a_strangers_fork_does_not_keep_an_end_open(pair: tuple[Channel, Channel]):
    """Such as a DataLoader worker of a rank that dies."""
    ours, theirs = pair
    told, tell = os.pipe()

    def child() -> None:
        os.write(tell, b"x" if theirs.fileno() == ours.fileno() == -1 else b"open")
        time.sleep(600)

    pid = fork(child)
    assert os.read(told, 8) == b"x"
    theirs.close()

    assert readable(ours)
    with pytest.raises(EOFError):
        ours.receive()

    end(pid)
    os.close(told)
    os.close(tell)


def test_a_fork_of_our_own_keeps_the_end_that_it_chooses():
    kept = Channel.pair()
    other = Channel.pair()

    def child() -> None:
        kept[1].keep_only()
        kept[1].send([one.fileno() for one in (kept[0], *other)])
        time.sleep(600)

    with own_fork():
        pid = fork(child)
    kept[1].close()
    other[1].close()

    assert kept[0].receive() == [-1, -1, -1]
    with pytest.raises(EOFError):
        other[0].receive()
    assert not readable(kept[0], 0)

    end(pid)
    kept[0].close()
    other[0].close()
