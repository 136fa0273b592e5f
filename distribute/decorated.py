"""The decorated function: bound like a function, called like one, and with a plan to show."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import wrapt

from distribute import engine, reference
from distribute.errors import RequestError
from distribute.plan import Plan
from distribute.request import Request
from distribute.task import context_position

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)
S = TypeVar("S")

if TYPE_CHECKING:

    class Distributed(Generic[P, R]):
        """A function that runs on every device when it is called."""

        __wrapped__: Callable[..., Any]
        __name__: str

        def __init__(self, function: Callable[..., Any], request: Request) -> None: ...

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Runs the function on every device and returns rank 0's value.

            Raises:
                RequestError: It cannot be carried out; nothing was started.
                TypeError: The arguments do not fit the function; nothing was started.
                WorkerDied: A rank's process ended without a value or an exception.
                Exception: Whatever the function raised on the rank that failed first.
            """
            ...

        def plan(self) -> Plan:
            """Returns what a call would do now; starts nothing. Print it."""
            ...

        @overload
        def __get__(self, instance: None, owner: type | None = None) -> Distributed[P, R]: ...
        @overload
        def __get__(
            self: Distributed[Concatenate[S, Q], R], instance: S, owner: type | None = None
        ) -> Distributed[Q, R]: ...
        def __get__(self, instance: Any, owner: type | None = None) -> Any: ...

else:

    class _Calling:
        """What a decorated function and its bound form have in common."""

        def __call__(self, *args, **kwargs):
            __tracebackhide__ = True
            function = self.__wrapped__
            site = engine.calling_site(function)
            return engine.call(self._self_request, function, args, kwargs, site)

        def plan(self):
            return engine.plan(self._self_request)

        @property
        def __signature__(self):
            signature = inspect.signature(self.__wrapped__)
            position = context_position(self.__wrapped__)
            if position is None:
                return signature
            parameters = list(signature.parameters.values())
            del parameters[position]
            return signature.replace(parameters=parameters)

        def __repr__(self):
            return f"<distributed {self.__wrapped__!r}>"

    class _BoundDistributed(_Calling, wrapt.BoundFunctionWrapper):
        @property
        def _self_request(self):
            return self._self_parent._self_request

        @property
        def __func__(self):
            # What `inspect` asks of something that says it is a method.
            return self._self_parent

        def __reduce_ex__(self, protocol):
            if self._self_instance is None:  # a static method, or reached through its class
                return reference.imported, (self.__module__, self.__qualname__)
            return getattr, (self._self_instance, self.__name__)

    class Distributed(_Calling, wrapt.FunctionWrapper):
        """A function that runs on every device when it is called."""

        __bound_function_wrapper__ = _BoundDistributed

        def __init__(self, function, request):
            super().__init__(function, _not_called)
            self._self_request = request

        def __class_getitem__(cls, item):
            return cls

        def __reduce_ex__(self, protocol):
            function = self.__wrapped__
            module, name = function.__module__, function.__qualname__
            if reference.importable(module) and reference.lookup(module, name) is self:
                return reference.imported, (module, name)
            return Distributed, (function, self._self_request)

    def _not_called(wrapped, instance, args, kwargs):
        raise NotImplementedError  # `_Calling.__call__` stands before wrapt's


def checked(fn: Any, door: str) -> Callable[..., Any]:
    """Returns what was given as a function, if it is one.

    Args:
        fn: What was given.
        door: The name of the function that it was given to.
    """
    if callable(fn) or isinstance(fn, classmethod | staticmethod):
        return cast("Callable[..., Any]", fn)
    raise RequestError(
        f"{door}({type(fn).__name__} {fn!r:.60})",
        "it is not callable",
        f"pass the function itself, distribute.{door}(fn) and not distribute.{door}(fn()), if this "
        "is what it returned",
    )


def inside(fn: Any, door: str) -> Callable[..., Any]:
    """Returns the function in what was given, which may be decorated; see `checked`."""
    found: Callable[..., Any] = inspect.unwrap(
        checked(fn, door), stop=lambda one: not isinstance(one, Distributed)
    )
    return found
