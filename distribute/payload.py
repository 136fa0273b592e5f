"""Objects of the user as bytes and back: cloudpickle, with large buffers in memory files.

A payload that is small travels inside the message that carries it. A large one is written once
into anonymous memory files, whose descriptors travel; every receiver maps them copy-on-write, so
that N ranks share one physical copy until they write.
"""

from __future__ import annotations

import ctypes
import io
import marshal
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import cloudpickle

from distribute import cells, devices, memory, reference, stateful
from distribute.errors import RequestError
from distribute.sent import Sent

if TYPE_CHECKING:
    import torch

# Below this a message stays in a socket's buffer, so that nobody ever blocks in sending one.
INLINE_BYTES = 64 * 1024


@dataclass
class Payload:
    """One pickled object with its buffers.

    Attributes:
        sizes: Length in bytes of the pickle stream and of each out-of-band buffer, in order.
        elsewhere: Numbers of the buffers that the receiver has already, by their place there.
        inline: The concatenated bytes of the others when they are few, else None.
        files: Descriptors of the memory files that hold them otherwise. They are never pickled:
            the channel sends them beside the message.
    """

    sizes: list[int]
    inline: bytes | None
    files: list[int] = field(default_factory=list[int], compare=False)
    elsewhere: dict[int, int] = field(default_factory=dict[int, int])

    def __getstate__(self) -> tuple[list[int], bytes | None, dict[int, int]]:
        """Leaves the descriptors to the channel."""
        return self.sizes, self.inline, self.elsewhere

    def __setstate__(self, state: tuple[list[int], bytes | None, dict[int, int]]) -> None:
        self.sizes, self.inline, self.elsewhere = state
        self.files = []

    def load(
        self,
        known: Sequence[object] = (),
        *,
        held: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> Any:
        """Rebuilds the object; its tensors and arrays are writable and private to this process.

        Args:
            known: What stands here for the objects that the sender knew; see `pack`.
            held: Memory files of the buffers that were sent before, by number.
        """
        if self.inline is not None:
            whole = memoryview(bytearray(self.inline))
        else:
            here = (one for place, one in enumerate(self.sizes) if place not in self.elsewhere)
            whole = memory.mapped(self.files, sum(map(_padded, here)))
        parts: list[memoryview] = []
        start = 0
        for place, size in enumerate(self.sizes):
            number = self.elsewhere.get(place)
            if number is not None:
                parts.append(memory.mapped(held[number], size))
                continue
            parts.append(whole[start : start + size])
            start += _padded(size)
        token = _known.set(known)
        try:
            return pickle.loads(parts[0], buffers=parts[1:])
        finally:
            _known.reset(token)

    def close(self) -> None:
        """Closes this process's descriptors of the memory files; mappings of them stay valid."""
        files, self.files = self.files, []
        memory.close(files)


# What the payload that is being loaded calls by number.
_known: ContextVar[Sequence[object]] = ContextVar("known", default=())


def _of_known(number: int) -> object:
    return _known.get()[number]


class Again:
    """Stands for an object that was pickled before it in the same payload; else for None."""

    def __init__(self, obj: object) -> None:
        self.obj = obj


def pack(
    obj: object,
    *,
    main_names: frozenset[str] | None = None,
    home: bool = False,
    known: Sequence[object] = (),
    sent: Sent | None = None,
    own: Mapping[int, str] = MappingProxyType({}),
    used: list[str] | None = None,
) -> Payload:
    """Pickles an object.

    Args:
        obj: Any object that cloudpickle can send.
        main_names: Qualified names of the classes that the receiver's `__main__` module has too;
            they travel by reference, so that `isinstance` holds there. None means that the
            receiver has the same `__main__` as this process.
        home: Whether the object returns to the caller: tensors arrive detached and on the CPU,
            and models without their data-parallel wrapper.
        known: Objects that the receiver has as well: they are not sent but called by their number.
        sent: What the receivers of earlier messages keep, if they are to keep this one's, too.
        own: Names of variables of `__main__`, by the number of the object, for which the receiver
            takes its own.
        used: Gets the names of those that it was.
    """
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = _Pickler(stream, buffers.append, main_names, home, known)
    pickler.own = own
    pickler.dump(obj)
    if used is not None:
        used += pickler.used
    views = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = [view.nbytes for view in views]
    numbers: dict[int, int] = {}
    if sent is not None:
        found = [sent.number(view, pickler.owner(view)) for view in views[1:]]
        numbers = {place: one for place, one in enumerate(found, 1) if one is not None}
        views = [view for place, view in enumerate(views) if place not in numbers]
    parts = [part for view in views for part in (view, bytes(_padded(view.nbytes) - view.nbytes))]
    if sum(_padded(view.nbytes) for view in views) <= INLINE_BYTES:
        return Payload(sizes, b"".join(parts), elsewhere=numbers)
    return Payload(sizes, None, memory.written(parts), numbers)


def refusal(
    obj: object, *, main_names: frozenset[str] | None = None, home: bool = False
) -> Exception | None:
    """Returns why an object cannot be packed, or None; its large buffers are not copied."""
    try:
        pickler = _Pickler(cast("Any", _Nowhere()), lambda _: None, main_names, home)
        pickler.copies = False
        pickler.dump(obj)
    except Exception as error:
        return error
    return None


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def _padded(size: int) -> int:
    # Numbers must not lie across their own alignment; 64 bytes are enough for all of them.
    return -(-size // 64) * 64


def _reduce_file(file: Any) -> Any:
    if file in (sys.stdout, sys.stderr):
        return cloudpickle.Pickler.dispatch_table[io.TextIOWrapper](file)
    # cloudpickle would send all that is in the file, as a copy in memory.
    raise TypeError("cannot pickle '_io.TextIOWrapper' object")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle with storages out of band and two cases of classes and functions by reference."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {io.TextIOWrapper: _reduce_file}, cast("Any", cloudpickle.Pickler.dispatch_table)
    )

    def __init__(
        self,
        stream: io.BytesIO,
        on_buffer: Callable[[pickle.PickleBuffer], object],
        main_names: frozenset[str] | None,
        home: bool,
        known: Sequence[object] = (),
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=on_buffer)
        self._main_names = main_names
        self._home = home
        self.copies = True  # of what is on an accelerator; not for a mere look
        self.own: Mapping[int, str] = {}
        self.used: list[str] = []
        # What is pickled through a pointer must stay alive until it has been written.
        self._kept: list[object] = []
        # The storage behind each view of memory that has no object of its own.
        self._storages: dict[int, object] = {}
        self._numbers = {id(one): at for at, one in enumerate(known) if one is not None}
        self._begun: set[int] = set()

    def owner(self, view: memoryview) -> object:
        """Returns the object that a buffer belongs to: a storage, an array."""
        return self._storages.get(id(view.obj), view.obj)

    def reducer_override(self, obj: Any) -> Any:
        """Reduces what pickle and cloudpickle reduce badly for our use; leaves them the rest."""
        if id(obj) in self.own:
            self.used.append(self.own[id(obj)])
            return _of_script, (self.own[id(obj)],)
        reduced = self._reduce_code(obj)
        if reduced is NotImplemented and "torch" in sys.modules:
            reduced = self._reduce_torch(obj)
        if reduced is not NotImplemented:
            return reduced
        with reference.by_value(obj):
            return cast("Any", super()).reducer_override(obj)

    def _reduce_code(self, obj: Any) -> Any:
        if type(obj).__module__ == "distribute.decorated":
            # A decorated function passes for the function inside, and would be sent as that.
            return obj.__reduce_ex__(5)
        if isinstance(obj, type):
            if self._in_shared_main(obj):
                return obj.__qualname__
        elif isinstance(obj, types.FunctionType):
            if (obj.__module__, obj.__name__) == _OF_NEWER_DTYPES:
                return _rebuilder, ()
            return reference.decorated_reference(obj)
        elif isinstance(obj, types.CodeType):
            # cloudpickle leaves out the file's name, which tracebacks need to show the line.
            lines = cells.source(obj)
            if lines:
                return cells.rebuilt, (marshal.dumps(obj), obj.co_filename, lines)
            return marshal.loads, (marshal.dumps(obj),)
        return NotImplemented

    def _in_shared_main(self, cls: type) -> bool:
        if cls.__module__ != "__main__":
            return False
        if self._main_names is not None and cls.__qualname__ not in self._main_names:
            return False
        return reference.lookup("__main__", cls.__qualname__) is cls

    def _reduce_torch(self, obj: Any) -> Any:
        import torch

        if id(obj) in self._numbers:
            return _of_known, (self._numbers[id(obj)],)
        self._begun.add(id(obj))
        kind: object = obj.__class__
        if kind is Again:
            return _itself, (obj.obj if id(obj.obj) in self._begun else None,)
        if kind is torch.UntypedStorage and obj.device.type == "cpu":
            view = _storage_view(obj)
            self._kept += [obj, view]
            self._storages[id(view)] = obj
            return _storage, (pickle.PickleBuffer(view), obj.nbytes())
        if kind is torch.UntypedStorage and obj.device.type != "meta":
            # Of an accelerator: torch would bring it to the device of the same number.
            host = obj.cpu() if self.copies else None
            self._kept.append(host)
            return (_itself if self._home else _on_own_device), (host,)
        if kind is torch.TypedStorage:
            untyped = obj._untyped_storage
            self._kept.append(untyped)
            return _typed_storage, (untyped, obj.dtype)
        if isinstance(obj, torch.optim.Optimizer):
            return stateful.reduce_optimizer(obj)
        return self._reduce_for_home(obj) if self._home else NotImplemented

    def _reduce_for_home(self, obj: Any) -> Any:
        import torch

        if obj.__class__ is torch.Tensor and (obj.requires_grad or obj.device.type != "cpu"):
            plain = obj.detach().cpu()
            self._kept.append(plain)
            return _itself, (plain,)
        if "torch.nn.parallel" in sys.modules and isinstance(
            obj, torch.nn.parallel.DistributedDataParallel
        ):
            return _itself, (cast("Any", obj.module),)
        return NotImplemented


def _of_script(name: str) -> Any:
    """Returns this process's own variable of the script."""
    script = vars(sys.modules["__main__"])
    if name not in script:
        raise RequestError(
            f"variable `{name}`",
            "it cannot be sent to another process, and this rank has none, as the script makes it "
            "after its first distributed call",
            "make it before that call, or inside the function",
        )
    return script[name]


def _itself(obj: Any) -> Any:
    return obj


def _on_own_device(storage: Any) -> Any:
    own = devices.own()
    return storage if own is None or own.type == "cpu" else storage.to(device=own)


def _storage_view(storage: torch.UntypedStorage) -> Any:
    if storage.nbytes() == 0:
        return b""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def _storage(buffer: Any, nbytes: int) -> torch.UntypedStorage:
    import torch

    if nbytes == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


_OF_NEWER_DTYPES = ("torch._utils", "_rebuild_tensor_v3")


def _rebuilder() -> Any:
    """Returns what makes a tensor of a newer dtype, such as uint16 or float8, on a storage.

    torch's function for it takes a storage of another kind than it is given in a pickle.
    """
    return _rebuilt


def _rebuilt(untyped: Any, *args: Any) -> Any:
    import torch
    import torch._utils

    rebuild: Any = cast("Any", torch._utils)._rebuild_tensor_v3
    return rebuild(_typed_storage(untyped, torch.uint8), *args)


def _typed_storage(untyped: Any, dtype: torch.dtype) -> Any:
    import torch

    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=untyped, dtype=dtype, _internal=True
    )
