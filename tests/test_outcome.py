"""What became of a rank: its value or its exception, after a journey to the caller."""

from __future__ import annotations

import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distribute import Context, outcome, run
from distribute.errors import RemoteTraceback, WorkerDied, WorkerError
from distribute.outcome import Outcome, home
from distribute.tree import map_leaves

# -- exceptions --------------------------------------------------------------------------------


class Custom(Exception):
    """With an attribute beside its arguments."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.detail = {"lr": 0.1}


class Told(Exception):
    """Makes a text of what it is given."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no sample {name}")
        self.name = name


class TwoArguments(Exception):
    """pickle calls the class with the one argument that its base was given."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def caught(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def reported(error: BaseException) -> Outcome:
    """The outcome of rank 1 as the launcher receives it."""
    found = outcome.raised(1, error, local=False)
    arrived: Outcome = pickle.loads(pickle.dumps(found))
    if found.payload is not None:
        assert found.payload.files == []
    return arrived


def arrived(function: Callable[[], Any]) -> BaseException:
    """A function's exception after the journey."""
    return reported(caught(function)).error()


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def fail(error: BaseException) -> Callable[[], Any]:
    def raising() -> Any:
        raise error  # here it is raised

    return raising


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x", 3),
        KeyError("k"),
        OSError(2, "no such file", "/x"),
        Custom("c"),
        Told("17"),
        SystemError(),
    ],
    ids=repr,
)
def test_type_and_arguments(error: Exception):
    found = arrived(fail(error))

    assert type(found) is type(error)
    assert found is not error
    assert found.args == error.args
    assert str(found) == str(error)
    assert {k: v for k, v in vars(found).items() if k != "__notes__"} == vars(error)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit("g"), StopIteration(3)])
def test_exceptions_that_mean_something_to_python(error: BaseException):
    found = arrived(fail(error))

    assert type(found) is type(error)
    assert found.args == error.args


def test_notes_come_first_and_ours_last():
    error = ValueError("x")
    error.add_note("of the user")

    notes = arrived(fail(error)).__notes__

    assert notes[0] == "of the user"
    assert len(notes) == 2
    assert notes[1].startswith("raised by rank 1 (process ")


def test_the_line_is_shown():
    text = shown(arrived(fail(ValueError("x"))))

    assert "raise error  # here it is raised" in text
    assert __file__ in text
    assert text.rstrip().splitlines()[-2] == "ValueError: x"


def test_the_ranks_own_traceback_is_the_cause():
    found = arrived(fail(ValueError("x")))

    assert type(found.__cause__) is RemoteTraceback
    assert "# here it is raised" in found.__cause__.text


def explicit() -> None:
    try:
        raise KeyError("first")
    except KeyError as first:
        first.add_note("note of the first")
        raise ValueError("second") from first


def implicit() -> None:
    try:
        raise KeyError("first")
    except KeyError:
        raise ValueError("second")  # noqa: B904


def suppressed() -> None:
    try:
        raise KeyError("first")
    except KeyError:
        raise ValueError("second") from None


def long() -> None:
    try:
        explicit()
    except ValueError as second:
        raise RuntimeError("third") from second


def test_an_explicit_cause():
    found = arrived(explicit)

    assert type(found) is ValueError
    assert type(found.__cause__) is KeyError
    assert found.__cause__.args == ("first",)
    assert found.__cause__.__notes__ == ["note of the first"]
    assert found.__suppress_context__


def test_an_implicit_context():
    found = arrived(implicit)

    assert found.__cause__ is None
    assert type(found.__context__) is KeyError
    assert not found.__suppress_context__


def test_a_suppressed_context():
    found = arrived(suppressed)

    assert found.__suppress_context__
    assert "KeyError" not in shown(found).rpartition("direct cause")[2]


@pytest.mark.parametrize("function", [explicit, implicit, suppressed, long])
def test_the_remote_traceback_is_at_the_far_end_of_the_chain(function: Callable[[], Any]):
    found: BaseException | None = arrived(function)
    chain: list[BaseException] = []
    while found is not None:
        chain.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)

    assert [type(one) is RemoteTraceback for one in chain] == [False] * (len(chain) - 1) + [True]
    assert "raise ValueError" in str(chain[-1])


def test_a_chain_that_is_a_circle():
    first, second = ValueError("first"), ValueError("second")
    first.__context__ = second
    second.__context__ = first

    found = arrived(fail(first))

    assert str(found) == "first"
    assert "here it is raised" in shown(found)


def test_the_frames_of_the_library_are_not_shown():
    """`map_leaves` stands for what calls a rank's function and catches what it raises."""

    def user(_: Any) -> Any:
        raise ValueError("x")

    error = caught(lambda: map_leaves(user, [1]))
    here = error.__traceback__
    assert here is not None
    assert here.tb_next is not None
    error = error.with_traceback(here.tb_next.tb_next)
    assert "map_leaves(fn" in shown(error)

    text = str(reported(error).error().__cause__)

    assert 'raise ValueError("x")' in text
    assert "map_leaves(fn" not in text


# -- groups ------------------------------------------------------------------------------------


def group() -> None:
    def of(function: Callable[[], Any]) -> Exception:
        error = caught(function)
        assert isinstance(error, Exception)
        return error

    inner = of(explicit)
    inner.add_note("note of a member")
    raise ExceptionGroup("several", [inner, ExceptionGroup("nested", [of(fail(KeyError("k")))])])


def test_a_group():
    found = arrived(group)

    assert type(found) is ExceptionGroup
    assert found.message == "several"
    assert [type(one) for one in found.exceptions] == [ValueError, ExceptionGroup]
    assert found.exceptions[0].__notes__ == ["note of a member"]
    assert found.subgroup(KeyError) is not None


def test_a_member_of_a_group_keeps_its_cause():
    found = arrived(group)

    assert isinstance(found, ExceptionGroup)
    cause = found.exceptions[0].__cause__
    assert type(cause) is KeyError
    assert cause.__notes__ == ["note of the first"]


# -- what cannot be sent or rebuilt ------------------------------------------------------------


def test_an_exception_that_cannot_be_rebuilt_is_described():
    found = arrived(fail(TwoArguments(404, "gone")))

    assert type(found) is WorkerError
    assert found.rank == 1
    assert found.type_name == f"{__name__}.TwoArguments"
    assert found.text == "404: gone"
    assert "# here it is raised" in found.traceback
    assert "TwoArguments: 404: gone" in str(found)
    assert "it cannot be rebuilt here: TypeError" in str(found)
    assert "# here it is raised" in shown(found)


def test_an_exception_that_cannot_be_pickled_is_described():
    found = arrived(fail(Locked("held")))

    assert type(found) is WorkerError
    assert (found.type_name, found.text) == (f"{__name__}.Locked", "held")
    assert "it cannot be pickled: TypeError" in str(found)
    assert "# here it is raised" in shown(found)


@pytest.mark.parametrize("cause", [TwoArguments(404, "gone"), Locked("held")], ids=["two", "lock"])
def test_an_exception_keeps_its_type_when_its_cause_cannot_be_sent(cause: Exception):
    """The caller's `except` clause is about the exception, not about where it came from."""

    def raising() -> None:
        try:
            raise cause
        except Exception as error:
            raise ValueError("outer") from error

    found = arrived(raising)

    assert type(found) is ValueError
    assert type(cause).__name__ in shown(found)


def test_an_exception_without_a_text():
    found = arrived(fail(Mute()))

    assert type(found) is Mute
    assert reported(Mute()).raised is not None
    assert "cannot be shown: ValueError" in str(reported(Mute()).raised)


def test_an_exception_with_a_tensor():
    error = ValueError("diverged", torch.ones(2, requires_grad=True) * 2)

    found = arrived(fail(error))

    assert found.args[0] == "diverged"
    assert torch.equal(found.args[1], torch.full((2,), 2.0))
    assert not found.args[1].requires_grad


def test_a_worker_error_can_travel_on():
    found = arrived(fail(TwoArguments(404, "gone")))

    again = arrived(fail(found))

    assert type(again) is WorkerError
    assert again.args == found.args


# -- the rank that is the calling process ------------------------------------------------------


def test_the_callers_own_exception_is_the_very_object():
    error = caught(explicit)
    cause = error.__cause__

    found = outcome.raised(0, error, local=True).error()

    assert found is error
    assert found.__cause__ is cause
    assert found.__notes__[-1].startswith("raised by rank 0 (process ")


# -- other ends --------------------------------------------------------------------------------


def test_a_death_by_a_signal():
    found = Outcome(2, "killed", signal=signal.SIGKILL, hint="a hint").error()

    assert type(found) is WorkerDied
    assert (found.rank, found.exit_code, found.signal) == (2, None, signal.SIGKILL)
    assert str(found).startswith("rank 2 was killed by SIGKILL (a hint) before it returned")


def test_an_end_without_a_report():
    found = outcome.system_exit(1, SystemExit(3), local=False).error()

    assert type(found) is WorkerDied
    assert str(found) == "rank 1 ended with exit code 3 when its function called sys.exit"


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("[..] Connection closed by peer [127.0.0.1]:1234"), True),
        (ConnectionResetError(104, "Connection reset by peer"), False),  # of the user's own network
        (RuntimeError("Broken pipe"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("Connection closed by peer"), False),
        (Mute(), False),
    ],
)
def test_an_echo_of_anothers_failure_is_known_by_its_words(error: Exception, echo: bool):
    assert outcome.raised(0, error, local=False).echo == echo


# -- values ------------------------------------------------------------------------------------


def returned(value: Any) -> Any:
    """A value after the journey."""
    return outcome.returned(1, value, local=False).value()


def test_a_value():
    found = outcome.returned(1, {"loss": 0.5}, local=False)

    assert not found.failed
    assert found.value() == {"loss": 0.5}


def test_the_callers_own_value_is_the_very_object():
    value = {"model": nn.Linear(2, 2), "losses": [0.5]}

    assert outcome.returned(0, value, local=True).value() is value


def test_a_value_that_nobody_wants_leaves_no_descriptor():
    found = outcome.returned(1, torch.ones(1 << 18), local=False)
    assert found.payload is not None
    assert found.payload.files

    found.drop()

    assert found.payload.files == []


@dataclass
class Node:
    name: str
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)


@dataclass
class Unset:
    x: int
    later: int = field(init=False)


class Point(tuple[int, int]):
    __slots__ = ()

    def __new__(cls, x: int, y: int) -> Point:
        return super().__new__(cls, (x, y))

    def __getnewargs__(self) -> tuple[int, int]:
        return self[0], self[1]


class ReadOnly(dict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        raise TypeError("read only")

    def __reduce__(self) -> Any:
        return ReadOnly, (dict(self),)


def circle() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def family() -> Node:
    parent = Node("parent")
    parent.children.append(Node("child", parent))
    return parent


UNCHANGED: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "numbers": lambda: [1, 2.0, (3, {"x": 4})],
    "tensor": lambda: {"x": torch.ones(2)},
    "array": lambda: np.ones(2),
    "module": lambda: nn.Linear(2, 2),
    "dataclass": lambda: Node("x"),
    "shape": lambda: torch.ones(2, 3).shape,
    "a dataclass with a field that is not set": lambda: Unset(1),
    "a tuple of another form": lambda: Point(1, 2),
    "a dict that is read only": lambda: ReadOnly(x=1),
    "a list in itself": circle,
    "a tree with parents": family,
}


@pytest.mark.parametrize("make", UNCHANGED.values(), ids=UNCHANGED)
def test_the_very_object_comes_home_when_nothing_has_to_change(make: Callable[[], Any]):
    value = make()

    assert home(value) is value


@pytest.mark.parametrize("make", UNCHANGED.values(), ids=UNCHANGED)
def test_what_comes_home_from_another_process_is_what_comes_home_from_this_one(
    make: Callable[[], Any],
):
    assert type(returned(make())) is type(home(make()))


def test_tensors_come_home_detached():
    loss = torch.ones(2, requires_grad=True) * 2
    value = {"loss": loss, "rest": (1, [loss])}

    for found in (home(value), returned(value)):
        assert not found["loss"].requires_grad
        assert not found["rest"][1][0].requires_grad
        assert torch.equal(found["loss"], loss)
    assert value["loss"] is loss


def test_parameters_stay_parameters():
    value = [nn.Parameter(torch.ones(2))]

    for found in (home(value), returned(value)):
        assert type(found[0]) is nn.Parameter
        assert found[0].requires_grad


# -- exceptions that allow nothing ---------------------------------------------------------------


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def raise_frozen(ctx: Context) -> None:
    ctx.barrier()
    raise Frozen(3)


def test_a_frozen_exception_is_raised_as_itself_where_the_function_runs_in_the_caller() -> None:
    with pytest.raises(Frozen) as caught:
        run(raise_frozen, devices=1)

    assert caught.value.code == 3
    assert [one.kind for one in caught.value.outcomes] == ["raised"]  # type: ignore[attr-defined]


def test_a_frozen_exception_of_another_process_is_told() -> None:
    with pytest.raises(WorkerError) as caught:
        run(raise_frozen, devices=2, start_method="fork")

    assert caught.value.type_name.endswith("Frozen")
    assert "cannot be rebuilt here: FrozenInstanceError" in str(caught.value)


class OneWay:
    """Can be pickled, and not rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_value_that_cannot_be_rebuilt_names_its_rank() -> None:
    def body(ctx: Context) -> object:
        return OneWay() if ctx.rank else ctx.world_size

    with pytest.raises(ValueError, match="no number") as caught:
        run(body, devices=2, start_method="fork", returns="all")

    assert caught.value.__notes__ == ["raised while the value of rank 1 was rebuilt in the caller"]
