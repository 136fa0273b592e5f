"""In a notebook a call works in the cell you have, whatever ran before: with a real kernel."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import EXAMPLE, Cell, Notebook, build
from tests.scripts import run_python, write

# What is chosen by itself, a fork, and what is chosen where a fork is not safe.
METHODS = ["auto", "forkserver"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as notebook:
        # What a kernel makes once: torch's late imports; the fork server, which no test has left.
        for method in METHODS:
            succeed(notebook.run(f"run(len, 'ab', devices=2, start_method={method!r})"))
        yield notebook


@pytest.fixture
def notebook(shared: Notebook) -> Iterator[Notebook]:
    """A kernel that has run other cells before, as kernels have."""
    yield shared
    assert shared.value("torch.distributed.is_initialized()") == "False"


def succeed(cell: Cell) -> Cell:
    assert cell.error is None, cell.error[2]
    return cell


# -- functions and classes of cells ----------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_what_cells_define_can_be_edited_and_run_again(notebook: Notebook, method: str) -> None:
    """The function, the class, and what they refer to are those of the cells that ran last."""
    train = f"""
    from dataclasses import dataclass

    class Net(torch.nn.Linear):
        version = 1

    @dataclass
    class Report:
        losses: list[float]
        version: int
        world: int

    rates = {{"lr": 0.1}}  # a global of the notebook

    def make(target):
        @distributed(devices=2, start_method={method!r})
        def train(ctx, steps):
            net = ctx.model(Net(3, 1))
            optimizer = torch.optim.SGD(net.parameters(), lr=rates["lr"])
            losses = []
            for _ in range(steps):
                loss = (net(torch.ones(4, 3)) - target).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print("rank", ctx.rank, "of", ctx.world_size, "v1")
            return Report(losses, net.version, ctx.world_size)
        return train

    train = make(5.0)
    report = train(10)
    print(type(report) is Report, report.losses[0] > report.losses[-1], report.version)
    """
    first = succeed(notebook.run(train))
    assert first.lines == ["True True 1", "[1] rank 1 of 2 v1", "rank 0 of 2 v1"]
    assert first.err == ""

    edited = succeed(
        notebook.run(train.replace('"v1"', '"v2"').replace("version = 1", "version = 2"))
    )
    assert edited.lines == ["True True 2", "[1] rank 1 of 2 v2", "rank 0 of 2 v2"]

    # The function that is in use looks its class up among the notebook's globals.
    assert (
        notebook.value("Net.version = 3; rates['lr'] = 0.0; report = train(3); report.version")
        == "3"
    )
    assert notebook.value("len(set(report.losses)), report.world") == "(1, 2)"


@pytest.mark.parametrize("method", METHODS)
def test_objects_of_cells_keep_their_class_both_ways(notebook: Notebook, method: str) -> None:
    """An argument is an instance of the cell's class in the rank, the result in the notebook."""
    cell = f"""
    import enum

    class Colour(enum.Enum):
        RED = 1

    class Box:
        def __init__(self, content):
            self.content = content

    def body(ctx, box):
        assert isinstance(box, Box)
        assert box.content is Colour.RED
        return Box(box.content), Colour.RED

    boxes = run(body, Box(Colour.RED), devices=2, returns="all", start_method={method!r})
    [(type(box) is Box, box.content is Colour.RED, colour is Colour.RED) for box, colour in boxes]
    """

    assert notebook.value(cell) == "[(True, True, True), (True, True, True)]"


def test_names_of_cells_exist_in_the_ranks(notebook: Notebook) -> None:
    """Case C14: functions, classes and globals of cells, and no start method given."""
    succeed(
        notebook.run("""
        class Line(torch.nn.Linear):
            pass
        K = 3
        """)
    )
    cell = succeed(
        notebook.run("""
        @distributed(devices=2)
        def train(ctx):
            net = ctx.model(Line(K, 1))
            print(f"IN-WORKER {ctx.rank}\\n", end="", flush=True)
            return ctx.world_size, sum(p.numel() for p in net.parameters())
        print("CELL", train(), run(lambda ctx: ctx.rank + 10, devices=2))
        """)
    )

    assert cell.lines == ["CELL (2, 4) 10", "IN-WORKER 0", "[1] IN-WORKER 1"]


def test_a_failed_call_is_followed_by_one_for_another_world(notebook: Notebook) -> None:
    """Case C15: the kernel is never in a process group itself, and nothing is left over."""
    cell = """
    @distributed(devices=2)
    def train(ctx):
        return "v1"
    a = train()

    @distributed(devices=2)
    def train(ctx):
        if ctx.rank == 1:
            raise ValueError("v2 broke")
    try:
        b = train()
    except Exception as e:
        b = "v2 broke" in str(e)

    @distributed(devices=3)
    def train(ctx):
        return ctx.world_size
    print("CELLS", a, b, train())
    """

    assert succeed(notebook.run(cell)).lines == ["CELLS v1 True 3"]


# -- which start method ----------------------------------------------------------------------------


def test_a_fork_is_safe_after_work_in_threads(notebook: Notebook) -> None:
    """Matrix products and a backward pass before and after it, on both sides, with two threads."""
    cell = """
    torch.set_num_threads(2)
    def product():
        return float((torch.ones(800, 800) @ torch.ones(800, 800)).sum())
    def gradient():
        w = torch.ones(800, 800, requires_grad=True)
        (torch.ones(800, 800) @ w).sum().backward()
        return float(w.grad.sum())
    def body(ctx):
        torch.set_num_threads(2)
        return ctx.world_size, product(), gradient(), ctx.all_reduce(product())

    before = product(), gradient()
    plan = str(distributed(devices=2)(body).plan()).splitlines()[0]
    values = run(body, devices=2, returns="all")
    print(plan)
    print(set(values), before == (product(), gradient()), torch.get_num_threads())
    """

    cell_ = succeed(notebook.run(cell))

    n = 800.0**3
    assert cell_.lines == [
        "start method  fork: a notebook kernel: the workers see what the cells made",
        f"{{(2, {n}, {n}, {2 * n})}} True 2",
    ]
    assert cell_.err == ""


@pytest.mark.parametrize(
    ("pretend", "restore"),
    [
        (
            "was = torch.cuda.is_initialized; torch.cuda.is_initialized = lambda: True",
            "torch.cuda.is_initialized = was",
        ),
        # Whichever library made the context has opened the driver's file.
        (
            "from distribute import devices; was = devices._CONTEXT_FILES\n"
            "context = open('nvidia-uvm', 'w')\n"
            "devices._CONTEXT_FILES = {os.path.abspath(context.name): 'CUDA'}",
            "devices._CONTEXT_FILES = was; context.close()",
        ),
    ],
    ids=["torch", "another library"],
)
def test_a_live_accelerator_leads_to_the_fork_server(
    notebook: Notebook, pretend: str, restore: str
) -> None:
    """One line says what and why; nobody has to restart the kernel."""
    succeed(notebook.run(pretend))
    try:
        cell = succeed(
            notebook.run("""
            @distributed(devices=2, accelerator="cpu", returns="all")
            def body(ctx):
                print("rank", ctx.rank)
                return ctx.world_size, torch.cuda.is_initialized()

            print(str(body.plan()).splitlines()[0])
            print(body())
            try:
                run(len, "ab", devices=2, accelerator="cpu", strategy="ddp_fork")
            except ValueError as error:
                print(error)
            """)
        )
    finally:
        succeed(notebook.run(restore))

    assert cell.lines == [
        "[(2, False), (2, False)]",
        "[1] rank 1",
        "rank 0",
        "start method  forkserver: a notebook kernel, where this process holds a CUDA context, "
        "which no fork survives",
        "start method 'fork': this process already holds a CUDA context, which no fork "
        'survives; use "forkserver", or leave it to "auto"',
    ]
    assert cell.err == (
        "distribute: the fork server makes the ranks: a notebook kernel, where this process holds "
        "a CUDA context, which no fork survives\n"
    )


# -- exceptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_shows_the_cell_and_its_line(notebook: Notebook, method: str) -> None:
    cell = notebook.run(f"""
    class Mine(Exception):
        pass

    def inner(ctx):
        if ctx.rank == 1:
            raise Mine("boom")  # the line
        ctx.barrier()

    run(inner, devices=2, start_method={method!r})
    """)

    assert cell.error is not None
    name, text, shown = cell.error
    assert (name, text) == ("Mine", "boom")
    remote = shown[: shown.index("direct cause")]
    assert re.search(
        r'  Cell In\[\d+\], line 6, in inner\n    raise Mine\("boom"\)  # the line\n', remote
    )
    assert "ipykernel_" not in shown  # what the kernel calls a cell is no news
    assert "raised by rank 1" in shown
    assert notebook.value("import sys; type(sys.last_value) is Mine") == "True"


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_knows_the_source_of_its_cell(notebook: Notebook, method: str) -> None:
    """`inspect.getsource` finds it, and so what compiles Python from its source."""
    cell = f"""
    import inspect
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x
    def body(ctx):
        assert inspect.getsource(scaled).startswith("def scaled")
        return torch.jit.script(scaled)(torch.ones(1)).item()
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(body, devices=2, start_method={method!r})
    got
    """

    assert notebook.value(cell) == "2.0"


@pytest.mark.parametrize("method", METHODS)
def test_a_hang_is_told_with_cells_and_lines(notebook: Notebook, method: str) -> None:
    cell = notebook.run(f"""
    def inner(ctx):
        if ctx.rank == 1:
            time.sleep(600)
        ctx.barrier()

    run(inner, devices=2, start_method={method!r}, deadline=5)
    """)

    assert cell.error is not None
    name, _, shown = cell.error
    assert name == "DeadlineExceeded"
    assert re.search(
        r"rank 0 is in barrier at Cell In\[\d+\]:4; rank 1 is at Cell In\[\d+\]:3, in inner", shown
    )
    assert re.search(r"  Cell In\[\d+\], line 3, in inner\n    time.sleep\(600\)(\n|$)", shown)


# -- output ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_lines_arrive_whole_and_while_the_cell_runs(notebook: Notebook, method: str) -> None:
    """Those of rank 1 have its number; standard error is standard error; C code counts."""
    go = notebook.directory / "go"
    go.unlink(missing_ok=True)
    cell = notebook.start(f"""
    def body(ctx):
        if ctx.rank == 0:
            ctx.barrier()  # a line of rank 0 is passed on in pieces if these are far apart
        for word in ("in", "pieces"):
            print(word, end=" ", flush=True)
            time.sleep(0.01)
        print()
        os.write(1, b"from C %d\\n" % ctx.rank)
        print("wrong", ctx.rank, file=sys.stderr)
        if ctx.rank == 1:
            ctx.barrier()
        while not os.path.exists("go"):
            time.sleep(0.01)
        print("bye", ctx.rank)

    run(body, devices=2, start_method={method!r})
    """)
    early = ["[1] from C 1", "[1] in pieces ", "from C 0", "in pieces "]
    notebook.until(lambda: sorted(cell.out.splitlines()) == early, cell)
    notebook.until(lambda: sorted(cell.err.splitlines()) == ["[1] wrong 1", "wrong 0"], cell)
    assert not cell.done
    go.touch()
    succeed(notebook.finish(cell))

    assert cell.lines == sorted([*early, "[1] bye 1", "bye 0"])
    assert not any(text.rpartition("\n")[2].startswith("[1]") for _, text in cell.stream)


def test_a_progress_bar_rewrites_its_line(notebook: Notebook) -> None:
    """Rank 0 has a bar, which arrives with its carriage returns while it moves."""
    for path in notebook.directory.glob("seen*"):
        path.unlink()
    cell = notebook.start("""
        def body(ctx):
            for number in ctx.progress(range(6), desc="bar", mininterval=0):
                while not os.path.exists(f"seen{number}"):
                    time.sleep(0.01)

        run(body, devices=2)
        """)
    for number in range(6):
        state = f"\rbar: {number / 6:4.0%}"
        notebook.until(lambda state=state: state in cell.out + cell.err, cell)
        assert not cell.done
        (notebook.directory / f"seen{number}").touch()
    succeed(notebook.finish(cell))

    text = cell.out + cell.err
    assert text.count("\r") >= 6
    assert "[1]" not in text
    states = text.strip().split("\r")
    assert states[0].startswith("bar:   0%")
    assert states[-1].startswith("bar: 100%")


def test_much_output_is_complete_and_in_order(notebook: Notebook) -> None:
    """5 MB of both ranks."""
    cell = succeed(
        notebook.run("""
        def body(ctx):
            for number in range(25_000):
                print(number, "x" * 92)

        run(body, devices=2)
        """)
    )

    lines = cell.out.splitlines()
    for mark in ("", "[1] "):
        mine = [line.removeprefix(mark) for line in lines if line.startswith("[1] ") == bool(mark)]
        assert mine == [f"{number} {'x' * 92}" for number in range(25_000)]


def test_output_is_in_its_own_cell(notebook: Notebook) -> None:
    """Whatever a rank still writes when it has returned, a later cell has none of it."""
    first = succeed(
        notebook.run("""
        import threading
        def body(ctx):
            begun = threading.Event()
            def babble():
                while True:
                    print("BABBLE", ctx.rank)
                    begun.set()
                    time.sleep(0.001)
            threading.Thread(target=babble, daemon=True).start()
            begun.wait()

        run(body, devices=2)
        """)
    )
    second = succeed(notebook.run("run(lambda ctx: print('second'), devices=2); time.sleep(0.5)"))

    assert set(first.lines) == {"BABBLE 0", "[1] BABBLE 1"}
    assert second.lines == ["[1] second", "second"]


def test_what_a_slow_page_takes_late_is_in_its_own_cell(notebook: Notebook) -> None:
    """The call does not wait for ever; what comes after it belongs to the cell that made it."""
    pages = [notebook.directory / name for name in ("page", "later")]
    for path in pages:
        path.unlink(missing_ok=True)
    slow = succeed(
        notebook.run("""
        from distribute import output
        quick, output._SLOW_SECONDS = sys.stdout.write, 0.1
        def wait_for(name):
            while not os.path.exists(name):
                time.sleep(0.01)
        sys.stdout.write = lambda text: (wait_for("page"), quick(text))[1]
        def body(ctx):
            for number in range(3):
                print("line", number)
                time.sleep(0.3)

        run(body, devices=2)
        sys.stdout.write, output._SLOW_SECONDS = quick, 10.0
        """)
    )
    assert slow.out == ""
    later = notebook.start("wait_for('later')")
    pages[0].touch()
    notebook.until(lambda: slow.out.count("\n") == 6, slow)
    assert not later.done
    pages[1].touch()
    succeed(notebook.finish(later))

    assert slow.lines == [
        *(f"[1] line {number}" for number in range(3)),
        *(f"line {number}" for number in range(3)),
    ]
    assert later.stream == []


def test_what_holds_the_notebooks_streams_writes_to_the_ranks(notebook: Notebook) -> None:
    """As a log handler from an earlier cell."""
    succeed(
        notebook.run("""
        log = logging.Logger("notebook")
        log.addHandler(logging.StreamHandler())
        held = sys.stdout
        """)
    )
    cell = succeed(
        notebook.run("""
        def body(ctx):
            log.warning("rank %d", ctx.rank)
            print("held", ctx.rank, file=held)

        run(body, devices=2)
        log.warning("here"), print("still here", file=held)
        """)
    )

    assert sorted(cell.err.splitlines()) == ["[1] rank 1", "here", "rank 0"]
    assert cell.lines == ["[1] held 1", "held 0", "still here"]


def test_what_a_fork_displays_is_shown(notebook: Notebook) -> None:
    cell = succeed(
        notebook.run("""
        from IPython.display import HTML, display
        def body(ctx):
            if ctx.is_main_process:
                display(HTML("<b>from a rank</b>"))
            return ctx.world_size

        run(body, devices=2)
        """)
    )

    # It comes another way than the kernel's word that the cell has ended.
    notebook.until(lambda: len(cell.shown) > 0, cell)
    assert [one["text/html"] for one in cell.shown] == ["<b>from a rank</b>"]
    assert cell.value == "2"


@pytest.mark.parametrize("method", METHODS)
def test_ranks_have_no_input(notebook: Notebook, method: str) -> None:
    """`input()` says so at once: the page would answer the kernel, not the rank."""
    cell = notebook.run(f"""
    import getpass
    def body(ctx):
        told = []
        for ask in (input, getpass.getpass, sys.stdin.readline):
            try:
                told.append(ask())
            except EOFError as error:
                told.append(type(error).__name__)
        return told

    run(body, devices=2, returns="all", start_method={method!r})
    """)

    assert succeed(cell).value == str([["EOFError", "EOFError", ""]] * 2)


# -- the end ---------------------------------------------------------------------------------------

FOREVER = """
    def forever(ctx):
        os.system("sleep 600 &")
        open(f"there{ctx.rank}", "w").close()
        if ctx.rank == 0:
            ctx.barrier()
        time.sleep(600)
    """


def start_forever(notebook: Notebook, call: str) -> Cell:
    for path in notebook.directory.glob("there*"):
        path.unlink()
    succeed(notebook.run(FOREVER))
    cell = notebook.start(call)
    notebook.until(lambda: len(list(notebook.directory.glob("there*"))) == 2, cell)
    return cell


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group", [False, True], ids=["kernel", "group"])
def test_the_stop_button_is_one_keyboard_interrupt(
    notebook: Notebook, method: str, group: bool
) -> None:
    """The ranks and what they started are gone, and the next cell works."""
    run = f"run(lambda ctx: ctx.all_reduce(1), devices=2, start_method={method!r})"
    notebook.value(run)  # the fork server is there
    before = notebook.processes()
    cell = start_forever(notebook, f"run(forever, devices=2, start_method={method!r})")
    notebook.interrupt(group=group)
    notebook.finish(cell)

    assert cell.error is not None
    assert cell.error[0] == "KeyboardInterrupt"
    assert cell.out == cell.err == ""
    notebook.only(before)
    assert notebook.value(run) == "2"


def test_the_stop_button_ends_a_call_of_a_cell_that_awaits(notebook: Notebook) -> None:
    """The kernel would only cancel what comes after the call."""
    before = notebook.processes()
    cell = start_forever(
        notebook, "import asyncio\nawait asyncio.sleep(0)\nrun(forever, devices=2)"
    )
    notebook.interrupt(group=False)
    notebook.finish(cell)

    assert cell.error is not None
    assert cell.error[0] == "KeyboardInterrupt"
    notebook.only(before)
    assert notebook.value("run(lambda ctx: ctx.all_reduce(1), devices=2)") == "2"


@pytest.mark.slow
def test_nothing_outlives_the_kernel(tmp_path: Path) -> None:
    """A restart while a call runs ends its ranks; so does SIGKILL to the kernel."""
    with Notebook(tmp_path) as notebook:
        start_forever(notebook, "run(forever, devices=2, start_method='forkserver')")
        old = notebook.processes()
        # The kernel, the fork server, two ranks, a `sleep` of each.
        assert len(old) >= 6
        notebook.restart()
        notebook.only({notebook.pid})
        assert notebook.value("run(lambda ctx: ctx.world_size, devices=2)") == "2"

        start_forever(notebook, "run(forever, devices=2)")
        os.kill(notebook.pid, signal.SIGKILL)
        notebook.only(set())


def test_two_notebooks_work_at_once(notebook: Notebook, tmp_path: Path) -> None:
    """Each waits for the other in the middle of its call."""
    mine, other = notebook.directory / "one", tmp_path / "two"
    mine.unlink(missing_ok=True)
    body = """
    from pathlib import Path
    def body(ctx):
        print("here", ctx.rank)
        if ctx.rank == 0:
            Path({mine!r}).touch()
        while not Path({other!r}).exists():
            time.sleep(0.01)
        return ctx.all_reduce({value})
    run(body, devices=2)
    """
    with Notebook(tmp_path) as second:
        cells = [
            notebook.start(body.format(mine=str(mine), other=str(other), value=1)),
            second.start(body.format(mine=str(other), other=str(mine), value=10)),
        ]
        succeed(notebook.finish(cells[0]))
        succeed(second.finish(cells[1]))

    assert [cell.value for cell in cells] == ["2", "20"]
    assert [cell.lines for cell in cells] == [["[1] here 1", "here 0"]] * 2


# -- kept workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_kept_workers_run_what_the_cells_define_now(notebook: Notebook, method: str) -> None:
    """Edited functions and classes, errors with cell and line, the stop button; one variable."""
    before = notebook.processes()
    make = f"""
    import distribute
    kept = distribute.workers(devices=2, start_method={method!r})
    """
    define = """
    class Box:
        version = 1

    def body(ctx, box):
        print("v1", ctx.rank)
        assert isinstance(box, Box)
        return Box(), ctx.all_reduce(Box.version)

    box, total = kept.run(body, Box())
    print(type(box) is Box, total)
    """
    succeed(notebook.run(make))
    assert succeed(notebook.run(define)).lines == ["True 2", "[1] v1 1", "v1 0"]
    workers = notebook.processes() - before
    edited = succeed(notebook.run(define.replace("v1", "v2").replace("= 1", "= 2")))
    assert edited.lines == ["True 4", "[1] v2 1", "v2 0"]
    assert notebook.processes() - before == workers

    failed = notebook.run("""
    def fail(ctx):
        raise ValueError("kept")  # the line
    kept.run(fail)
    """)
    assert failed.error is not None
    assert re.search(r"Cell In\[\d+\], line 2, in fail\n    raise ValueError", failed.error[2])
    notebook.only(before)

    cell = start_forever(notebook, "kept.run(forever)")
    notebook.interrupt(group=True)
    notebook.finish(cell)
    assert cell.error is not None
    assert cell.error[0] == "KeyboardInterrupt"
    notebook.only(before)
    assert notebook.value("kept.run(lambda ctx: ctx.all_reduce(3))") == "6"
    succeed(notebook.run("kept.close()"))
    notebook.only(before)


# -- the example -----------------------------------------------------------------------------------

EXECUTE = """
    import json, sys
    import nbformat
    from nbclient import NotebookClient
    notebook = nbformat.read(sys.argv[1], 4)
    NotebookClient(notebook, coalesce_streams=True).execute()
    print(json.dumps([cell.get("outputs", []) for cell in notebook.cells]))
    """


def test_the_example_is_what_its_source_says() -> None:
    """`python -m tests.notebook` makes it."""
    assert EXAMPLE.read_text() == build()


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    """Two ranks train, with a bar, a figure, an error on purpose, and workers that stay."""
    script = write(tmp_path, EXECUTE)
    environ = {"IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    ended = run_python(script, EXAMPLE, cwd=tmp_path, environ=environ)
    assert ended.code == 0, ended.text
    cells = json.loads(ended.out.splitlines()[-1])
    outputs = [one for cell in cells for one in cell]
    text = "".join(one["text"] for one in outputs if one["output_type"] == "stream")

    assert not [one for one in outputs if one.get("name") == "stderr"]
    assert re.search(r"^training: 100%\|.*\| 8/8 \[.*\]$", text, re.MULTILINE)
    for start in ("rank 0 of 2: last loss ", r"\[1\] rank 1 of 2: last loss "):
        assert re.search(f"^{start}", text, re.MULTILINE)
    assert [one for one in outputs if "image/png" in one.get("data", {})]
    errors = [one for one in outputs if one["output_type"] == "error"]
    assert [one["ename"] for one in errors] == ["RuntimeError"]
    shown = "\n".join(errors[0]["traceback"])
    assert "return ctx.all_reduce(nn.Linear(8, 2)(x).sum().item())" in shown
    assert "raised by rank 1" in shown
    trained = re.search(r"^trained: +(\d+\.\d)% right$", text, re.MULTILINE)
    assert trained is not None
    assert float(trained[1]) > 90
    assert re.search(r"^another call took \d+\.\d+", text, re.MULTILINE)
