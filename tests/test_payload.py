"""What the user's objects are after a journey: the same values, private and writable."""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distribute.payload import INLINE_BYTES, Payload, pack
from distribute.reference import importable
from distribute.world import World
from tests.ranks import on_ranks

HERE = str(Path(__file__).parent.parent)
LARGE = 1 << 18  # float32 elements: 1 MB


def sent(obj: Any, **options: Any) -> Any:
    """An object after a journey."""
    payload = pack(obj, **options)
    try:
        return payload.load()
    finally:
        payload.close()


def descriptors() -> int:
    gc.collect()  # what earlier tests have left is not closed between two looks
    return len(os.listdir("/proc/self/fd"))


# -- tensors -----------------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    # Those that torch's own pickles do not bring back.
    torch.uint16,
    torch.uint64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7), (600, 700)], ids=str)
def test_a_tensor(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = (torch.rand(shape) * 9).to(dtype)

    found = sent(tensor)

    assert type(found) is torch.Tensor
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert found.tolist() == tensor.tolist()
    assert not found.requires_grad


def test_strides_are_kept():
    tensor = torch.arange(24.0).reshape(4, 6)

    for view in (tensor.T, tensor[1:3, ::2], tensor[:1].expand(5, 6)):
        found = sent(view)
        assert torch.equal(found, view)
        assert found.stride() == view.stride()


@pytest.mark.parametrize("size", [10, LARGE])
def test_views_of_one_storage_stay_tied(size: int):
    base = torch.zeros(size)

    found, head = sent((base, base[:4]))
    found[2] = 7.0

    assert head[2] == 7.0
    assert base[2] == 0.0


def test_views_of_several_types_stay_tied():
    base = torch.zeros(8, dtype=torch.float32)

    found, bits = sent((base, base.view(torch.int32)))
    found[0] = 1.0

    assert bits[0] == 0x3F800000


def test_the_same_tensor_twice_stays_the_same():
    tensor = torch.ones(3)

    first, second = sent([tensor, tensor])

    assert first is second


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_leaf_keeps_requires_grad(requires_grad: bool):
    tensor = torch.ones(3, requires_grad=requires_grad)
    parameter = nn.Parameter(torch.ones(3), requires_grad=requires_grad)

    found, found_parameter = sent((tensor, parameter))

    assert found.requires_grad == found_parameter.requires_grad == requires_grad
    assert type(found_parameter) is nn.Parameter
    assert found.is_leaf


def test_a_sparse_tensor():
    tensor = torch.eye(50).to_sparse()

    assert torch.equal(sent(tensor).to_dense(), torch.eye(50))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 400)
        self.head = nn.Linear(400, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))


def test_a_module_keeps_tied_weights():
    model = Tied()

    found = sent(model)

    assert type(found) is Tied
    assert found.head.weight is found.embed.weight
    assert torch.equal(found.head.weight, model.head.weight)
    assert found.count == 3
    assert [name for name, _ in found.named_parameters()] == ["embed.weight"]


def test_an_optimizer_goes_on_with_the_model_that_it_travels_with():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    found, found_optimizer = sent((model, optimizer))

    assert found_optimizer.param_groups[0]["params"][0] is found.weight
    assert torch.equal(
        found_optimizer.state[found.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )


# -- arrays and buffers ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (5, 7), (600, 700)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array(shape: tuple[int, ...], order: Any):
    array = np.asarray(np.random.default_rng(0).random(shape), order=order)

    found = sent(array)

    assert found.dtype == array.dtype
    assert np.array_equal(found, array)
    assert found.flags.writeable


def test_arrays_of_other_kinds():
    words = np.array(["a", "bc", None], dtype=object)
    records = np.zeros(3, dtype=[("x", "f4"), ("y", "i8")])
    strided = np.arange(100_000)[::3]

    found = sent((words, records, strided))

    for one, original in zip(found, (words, records, strided), strict=True):
        assert one.dtype == original.dtype
        assert np.array_equal(one, original)


@pytest.mark.parametrize("size", [10, 200_000])
def test_loaded_numbers_lie_where_the_processor_expects_them(size: int):
    """What lies across its own alignment is slower, and undefined behaviour for compiled code."""

    def aligned(name: str) -> tuple[bool, bool]:
        found = sent({name: torch.zeros(size, dtype=torch.float64), "array": np.zeros(size)})
        return found[name].data_ptr() % 8 == 0, bool(found["array"].flags.aligned)

    # The length of the name shifts what follows in the stream.
    assert [aligned("x" * length) for length in range(1, 9)] == [(True, True)] * 8


def test_an_odd_number_of_bytes_does_not_shift_what_follows():
    mask, numbers = sent((torch.ones(3, dtype=torch.bool), torch.zeros(5, dtype=torch.float64)))

    assert mask.all()
    assert numbers.data_ptr() % 8 == 0


# -- where the bytes are -----------------------------------------------------------------------


def test_a_small_object_is_in_the_message():
    payload = pack(torch.zeros(100))

    assert not payload.files
    assert payload.inline is not None
    # Every part begins at a multiple of 64 bytes.
    assert 0 <= len(payload.inline) - sum(payload.sizes) < 64 * len(payload.sizes)
    assert len(payload.inline) <= INLINE_BYTES


@pytest.mark.parametrize(
    "obj",
    [torch.ones(LARGE), np.ones(LARGE), b"x" * (1 << 20), "x" * (1 << 20), list(range(500_000))],
    ids=["tensor", "array", "bytes", "string", "list"],
)
def test_a_large_object_is_in_a_memory_file(obj: Any):
    payload = pack(obj)

    assert payload.inline is None
    assert len(payload.files) == 1
    padding = os.fstat(payload.files[0]).st_size - sum(payload.sizes)
    assert 0 <= padding < 64 * len(payload.sizes)
    assert sum(payload.sizes) >= 1 << 20
    assert not os.get_inheritable(payload.files[0])

    found = payload.load()
    payload.close()
    assert type(found) is type(obj)
    assert np.array_equal(found, obj)


def test_the_boundary_is_the_size_of_the_whole():
    def files(size: int) -> int:
        payload = pack(b"x" * size)
        found = len(payload.files)
        payload.close()
        return found

    overhead = sum(pack(b"x" * 60_000).sizes) - 60_000

    assert files(INLINE_BYTES - overhead) == 0
    assert files(INLINE_BYTES - overhead + 1) == 1


def test_a_pickled_payload_leaves_its_descriptor_behind():
    payload = pack(torch.ones(LARGE))

    again: Payload = pickle.loads(pickle.dumps(payload))

    assert again.files == []
    assert again.sizes == payload.sizes
    payload.close()


def test_a_payload_may_be_closed_twice():
    payload = pack(torch.ones(LARGE))
    payload.close()
    payload.close()

    assert payload.files == []


# -- private and writable ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("make", [torch.zeros, np.zeros], ids=["tensor", "array"])
def test_what_is_written_into_one_copy_shows_in_no_other(make: Callable[[int], Any], size: int):
    source = make(size)
    payload = pack(source)

    first, second = payload.load(), payload.load()
    first[:] = 1
    third = payload.load()
    payload.close()

    assert (first == 1).all()
    assert (source == 0).all()
    assert (second == 0).all()
    assert (third == 0).all()


def test_what_is_written_into_the_source_afterwards_shows_in_no_copy():
    source = torch.zeros(LARGE)
    payload = pack(source)
    source.fill_(1)

    assert (payload.load() == 0).all()
    payload.close()


def test_a_loaded_object_outlives_its_payload():
    payload = pack(torch.arange(LARGE))
    found = payload.load()
    payload.close()
    del payload

    assert torch.equal(found, torch.arange(LARGE))
    found += 1
    assert found[-1] == LARGE


def test_a_loaded_model_trains():
    model = sent(nn.Linear(600, 600))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    model(torch.ones(2, 600)).sum().backward()
    optimizer.step()

    assert not torch.equal(before, model.weight)


# -- descriptors -------------------------------------------------------------------------------


def test_journeys_leave_no_descriptor():
    before = descriptors()

    for _ in range(20):
        sent(torch.ones(LARGE))
        with pytest.raises(TypeError, match="pickle"):
            pack((torch.ones(LARGE), sys._getframe()))

    assert descriptors() == before


def test_a_loaded_object_holds_no_descriptor():
    """A sweep may keep thousands of results."""
    before = descriptors()

    kept = [sent(torch.full((LARGE,), float(number))) for number in range(5)]
    held = descriptors() - before
    values = [float(one[0]) for one in kept]
    del kept

    assert values == [0, 1, 2, 3, 4]
    assert held == 0


MANY = """
import resource, torch
from distribute.payload import pack
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
tensors = [torch.full((n % 50,), float(n)) for n in range(3000)]
payload = pack(tensors)
found = payload.load()
payload.close()
assert len(found) == 3000
assert all(torch.equal(one, other) for one, other in zip(tensors, found))
print("fine")
"""


def test_thousands_of_tensors_need_few_descriptors():
    environ = {**os.environ, "PYTHONPATH": HERE}

    said = subprocess.check_output(
        [sys.executable, "-c", MANY], env=environ, text=True, timeout=100
    )

    assert said == "fine\n"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 256


# -- functions and classes ---------------------------------------------------------------------


def test_a_lambda():
    assert sent(lambda x: x + 1)(1) == 2


def test_a_function_that_travels_by_value_keeps_the_name_of_its_file():
    """A traceback needs it to show the line."""
    code = sent(lambda: 1 / 0).__code__

    assert code.co_filename == __file__
    assert code.co_firstlineno > 1


def test_a_closure_brings_what_it_holds():
    weight = torch.full((LARGE,), 2.0)
    factor = 3

    def scaled(x: float) -> torch.Tensor:
        return weight * factor * x

    found = sent(scaled)

    assert torch.equal(found(1.0), weight * 3)


def test_a_local_class():
    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

        def double(self) -> int:
            return 2 * self.x

    found = sent(Local(4))

    assert found.double() == 8
    assert isinstance(found, Local)


@dataclass
class Config:
    rate: float


def test_a_class_of_a_module_travels_by_reference():
    found = sent((Config, Config(0.5)))

    assert found == (Config, Config(0.5))
    assert b"rate" not in (pack(Config).inline or b"rate")


@pytest.fixture(params=["not there", "something else"])
def loose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[ModuleType]:
    """A module from a file that the search path does not lead to, as pytest makes of a test.

    There is nothing of its name on the search path, or another file.
    """
    path = tmp_path / "loose_module.py"
    path.write_text("def answer():\n    return 42\nclass Kind:\n    pass\n")
    if request.param == "something else":
        other = tmp_path / "other"
        other.mkdir()
        (other / "loose_module.py").touch()
        monkeypatch.syspath_prepend(str(other))
    spec = importlib.util.spec_from_file_location("loose_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loose_module"] = module
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("loose_module", None)


def test_what_nobody_else_can_import_travels_by_value(loose: ModuleType):
    assert not importable("loose_module")
    payload = pack((loose.answer, loose.Kind()))
    del sys.modules["loose_module"]

    answer, thing = payload.load()

    assert answer() == 42
    assert type(thing).__name__ == "Kind"


def test_a_package_without_a_file_must_be_on_the_search_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """pytest's importlib mode makes one of the directory of tests."""
    (tmp_path / "loose_space").mkdir()
    (tmp_path / "loose_space" / "inner.py").write_text("def answer():\n    return 42\n")
    outer = importlib.machinery.ModuleSpec("loose_space", None, is_package=True)
    outer.submodule_search_locations = [str(tmp_path / "loose_space")]
    monkeypatch.setitem(sys.modules, "loose_space", importlib.util.module_from_spec(outer))
    inner = importlib.import_module("loose_space.inner")
    monkeypatch.setitem(sys.modules, "loose_space.inner", inner)

    assert not importable("loose_space.inner")

    monkeypatch.syspath_prepend(str(tmp_path))
    assert importable("loose_space.inner")


def test_an_import_hook_of_the_old_kind_is_passed_over(
    loose: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    """Python's own import does so: a finder need not have `find_spec`."""
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])

    assert not importable("loose_module")
    assert sent(loose.answer)() == 42


@pytest.mark.parametrize("registered", [True, False])
def test_what_the_user_registered_with_cloudpickle_stays_so(loose: ModuleType, registered: bool):
    if registered:
        cloudpickle.register_pickle_by_value(loose)

    pack(loose.answer)

    found = "loose_module" in cloudpickle.list_registry_pickle_by_value()
    if found:
        cloudpickle.unregister_pickle_by_value(loose)
    assert found == registered


@pytest.mark.parametrize(
    ("name", "can"),
    [("json", True), ("torch.nn", True), ("pytest", True), ("__main__", False), (None, False)],
)
def test_what_a_fresh_interpreter_can_import(name: str | None, can: bool):
    assert importable(name) == can


# -- the classes of a script -------------------------------------------------------------------

SENDER = """
import os, pickle, sys
from dataclasses import dataclass
from distribute.payload import pack

@dataclass
class Config:
    rate: float
    def twice(self): return 2 * self.rate

class Outer:
    class Inner:
        pass

shared = {"shared": frozenset({"Config", "Outer.Inner"}), "alone": frozenset(), "same": None}
payload = pack([Config(0.5), Outer.Inner()], main_names=shared[sys.argv[1]])
sys.stdout.buffer.write(pickle.dumps(payload))
sys.stdout.flush()
os.close(1)
back = pickle.load(open(0, "rb", closefd=False)).load()
sys.stderr.write(str(isinstance(back, Config)))
"""
# Another program, whose `__main__` has the classes too, or has not.
RECEIVER = """
import json, os, pickle, sys
from distribute.payload import pack
if sys.argv[1] != "alone":
    exec('''
class Config:
    def twice(self): return "here"
class Outer:
    class Inner: pass
''')
config, inner = pickle.load(open(0, "rb", closefd=False)).load()
mine = sys.argv[1] != "alone" and isinstance(config, Config) and isinstance(inner, Outer.Inner)
sys.stderr.write(json.dumps([mine, config.rate, config.twice()]))
sys.stdout.buffer.write(pickle.dumps(pack(config, home=True)))
sys.stdout.flush()
os.close(1)
"""


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("shared", [True, 0.5, "here"]),
        ("same", [True, 0.5, "here"]),
        ("alone", [False, 0.5, 1.0]),
    ],
)
def test_classes_of_a_script_travel_by_reference_where_they_are_and_by_value_elsewhere(
    how: str, found: Any, tmp_path: Path
):
    (tmp_path / "sender.py").write_text(SENDER)
    (tmp_path / "receiver.py").write_text(RECEIVER)
    environ = {**os.environ, "PYTHONPATH": HERE}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    with (
        subprocess.Popen([sys.executable, tmp_path / "sender.py", how], env=environ, **pipes) as a,
        subprocess.Popen(
            [sys.executable, tmp_path / "receiver.py", how], env=environ, **pipes
        ) as b,
    ):
        assert a.stdout is not None
        there, said = b.communicate(a.stdout.read(), timeout=100)
        _, home = a.communicate(there, timeout=100)

    assert json.loads(said) == found
    assert home == b"True"  # it is still of its class when it comes back


# -- home --------------------------------------------------------------------------------------


def test_results_come_home_detached():
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * 2).sum()

    found = sent({"loss": loss, "plain": torch.ones(2)}, home=True)

    assert found["loss"] == 6.0
    assert not found["loss"].requires_grad
    assert found["loss"].grad_fn is None


def test_the_same_result_twice_stays_the_same():
    loss = torch.ones(3, requires_grad=True) * 2

    first, second = sent([loss, loss], home=True)

    assert first is second


def test_a_model_comes_home_as_itself():
    model = Tied()

    found = sent(model, home=True)

    assert found.head.weight is found.embed.weight
    assert found.head.weight.requires_grad


def test_a_model_comes_home_without_its_wrapper():
    def wrapped(world: World) -> Any:
        model = nn.Sequential(DistributedDataParallel(nn.Linear(3, 2)), nn.ReLU())
        alone = sent(model[0], home=True)
        inside = sent({"model": model}, home=True)["model"]
        same = torch.equal(alone.weight, model[0].module.weight)
        return type(alone).__name__, type(inside[0]).__name__, same

    assert on_ranks(2, wrapped) == [("Linear", "Linear", True)] * 2
