"""Where the context goes, which arguments fit, and which of them can be sent."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ForwardRef

import pytest

import distribute
from distribute import Context
from distribute.task import Own, Task, check_arguments, context_position, pack_arguments

if TYPE_CHECKING:
    import unknown  # type: ignore[import-not-found]

    from distribute import context as hidden


# -- where the context goes --------------------------------------------------------------------


class Other:
    """Another library's module with a `Context` of its own."""

    class Context:
        pass


def annotated(ctx: Context, lr: float) -> None: ...
def any_name(c: Context) -> None: ...
def through_package(c: distribute.Context) -> None: ...
def under_type_checking(c: hidden.Context) -> None: ...
def quoted(c: "Context") -> None: ...  # noqa: UP037
def unannotated(ctx, lr): ...
def positional_only(ctx, /, lr): ...
def defaulted(ctx=None): ...
def second(lr, ctx): ...
def other_name(context): ...
def others(ctx: Other.Context) -> None: ...
def others_under_type_checking(ctx: unknown.Context) -> None: ...
def annotated_otherwise(ctx: dict[str, int]) -> None: ...
def no_parameters() -> None: ...
def keyword_only(*, ctx: Context) -> None: ...
def variadic(*ctx: Context) -> None: ...
def keywords(**ctx: Any) -> None: ...


class Trainer:
    def fit(self, ctx: Context, lr: float) -> None: ...
    def evaluate(self, lr: float) -> None: ...
    def alone(self) -> None: ...

    @classmethod
    def build(cls, ctx: Context) -> None: ...

    @staticmethod
    def static(ctx: Context) -> None: ...

    def __call__(self, ctx: Context) -> None: ...


class OthersCommand:
    def __call__(self, ctx: Other.Context) -> None: ...


class OthersSubcommand(OthersCommand):
    pass


@pytest.mark.parametrize(
    ("function", "position"),
    [
        (annotated, 0),
        (any_name, 0),
        (through_package, 0),
        (under_type_checking, 0),
        (quoted, 0),
        (unannotated, 0),
        (positional_only, 0),
        (defaulted, 0),
        (lambda ctx: ctx, 0),
        (Trainer().fit, 0),
        (Trainer.fit, 1),
        (Trainer.build, 0),
        (Trainer.static, 0),
        (Trainer(), 0),
        (functools.partial(annotated, lr=0.1), 0),
        (functools.wraps(annotated)(lambda *args: None), 0),
        (second, None),
        (other_name, None),
        (others, None),
        (annotated_otherwise, None),
        (no_parameters, None),
        (keyword_only, None),
        (variadic, None),
        (keywords, None),
        (Trainer().evaluate, None),
        (Trainer.evaluate, None),
        (Trainer.alone, None),
        (Trainer().alone, None),
        (dict, None),
        (print, None),
    ],
)
def test_position_of_the_context(function: Callable[..., Any], position: int | None):
    assert context_position(function) == position


@pytest.mark.parametrize(
    "function",
    [others_under_type_checking, functools.partial(others), OthersCommand(), OthersSubcommand()],
    ids=["under TYPE_CHECKING", "partial", "callable object", "inherited"],
)
def test_another_librarys_context_is_left_alone(function: Callable[..., Any]):
    assert context_position(function) is None


def test_annotations_that_are_no_strings():
    def plain(ctx): ...

    for annotation, position in [(Context, 0), (ForwardRef("Context"), 0), (Other.Context, None)]:
        plain.__annotations__ = {"ctx": annotation}
        assert context_position(plain) == position


def test_an_alias_of_the_context():
    """As `from distribute import Context as C` makes it."""
    scope: dict[str, Any] = {"C": Context}
    exec("def f(x: 'C'): ...\ndef g(x: 'D'): ...", scope)

    assert context_position(scope["f"]) == 0
    assert context_position(scope["g"]) is None


def test_a_context_of_another_module_under_the_same_name():
    module = ModuleType("other")
    module.__dict__["Context"] = Other.Context
    exec("def f(ctx: 'Context'): ...", module.__dict__)

    assert context_position(module.__dict__["f"]) is None


# -- running -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "given"), [(None, (1, 2)), (0, ("ctx", 1, 2)), (1, (1, "ctx", 2))]
)
def test_the_context_is_put_in_its_place(position: int | None, given: tuple[Any, ...]):
    task = Task(lambda *args, **kwargs: (args, kwargs), (1, 2), {"k": 3}, position)

    assert task.run("ctx") == (given, {"k": 3})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(annotated, (), {}, 0), r"annotated\(\): missing a required argument: 'lr'"),
        (Task(annotated, (1, 2), {}, 0), r"annotated\(\): too many positional arguments"),
        (Task(annotated, (1,), {"rate": 1}, 0), r"annotated\(\): .*unexpected keyword.*'rate'"),
        (Task(annotated, (1,), {"ctx": 1}, 0), r"annotated\(\): multiple values.*'ctx'"),
        (Task(Trainer().fit, (), {}, 0), r"Trainer\.fit\(\): missing.*'lr'"),
        (Task(keyword_only, (), {}), r"keyword_only\(\): missing.*'ctx'"),
        (Task(no_parameters, (1,), {}), r"no_parameters\(\): too many"),
    ],
)
def test_arguments_that_do_not_fit_are_a_type_error(task: Task, message: str):
    with pytest.raises(TypeError, match=message) as caught:
        check_arguments(task)

    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "task",
    [
        Task(annotated, (1,), {}, 0),
        Task(annotated, (), {"lr": 1}, 0),
        Task(Trainer().fit, (1,), {}, 0),
        Task(Trainer.fit, (Trainer(), 1), {}, 1),
        Task(functools.partial(annotated, lr=1), (), {}, 0),
        Task(variadic, (1, 2, 3)),
        Task(print, (1, 2), {"end": ""}),
        Task(type("Callable", (), {"__call__": lambda self: None})()),
    ],
)
def test_arguments_that_fit_are_no_error(task: Task):
    check_arguments(task)


# -- sending -----------------------------------------------------------------------------------


def packed(task: Task) -> Task:
    payload = pack_arguments(task, frozenset())
    try:
        found: Task = payload.load()
        return found
    finally:
        payload.close()


def test_arguments_are_packed_without_the_function():
    found = packed(Task(lambda: threading.Lock(), (1, "x"), {"k": [2]}, 0))

    assert found == Task(None, (1, "x"), {"k": [2]})


def test_an_argument_that_cannot_be_sent_is_named_and_left_to_the_receiver():
    lock = threading.Lock()

    with pytest.warns(UserWarning, match="cannot be sent to another process") as caught:
        found = packed(Task(annotated, (1, lock, "x"), {"guard": lock, "k": 2}, 0))

    first, own, last = found.args
    assert (first, type(own), last) == (1, Own, "x")
    assert type(found.kwargs.pop("guard")) is Own
    assert found.kwargs == {"k": 2}
    texts = sorted(str(one.message) for one in caught)
    assert len(texts) == 2
    assert texts[0].startswith("argument `2`: a thread lock (_thread.lock) cannot be sent")
    assert texts[1].startswith("argument `guard`: a thread lock (_thread.lock) cannot be sent")
    assert all("cannot pickle" in text for text in texts)


def test_arguments_that_can_be_sent_are_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = packed(Task(annotated, (lambda: 7,), {}, 0))

    assert found.args[0]() == 7


def test_a_receiver_completes_a_task_with_what_it_has_itself():
    def function(*args: Any, **kwargs: Any) -> Any: ...

    own = Task(function, ("mine 0", "mine 1"), {"k": "mine k", "n": "mine n"}, 0)
    sent = Task(None, (10, Own()), {"k": Own(), "n": 20})

    assert sent.completed_by(own) == Task(function, (10, "mine 1"), {"k": "mine k", "n": 20}, 0)


def test_a_receiver_runs_the_function_that_was_sent():
    sent = Task(lambda: "sent", (), {})

    assert sent.completed_by(Task(lambda: "own")).run(SimpleNamespace()) == "sent"
