"""Re-exec: which call a worker joins, and what runs where."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from tests.scripts import run_python, write


def test_what_stands_above_the_call_runs_everywhere_and_prints_once(tmp_path: Path) -> None:
    """A worker's own output above the call is muted, and its code runs."""
    script = write(
        tmp_path,
        """
        import os, sys, distribute
        print("ABOVE")
        os.write(1, b"RAW\\n")
        with open("above.log", "a") as f:
            f.write(f"{distribute.is_worker()}\\n")

        @distribute.distributed(devices=3, strategy="ddp")
        def train(ctx):
            print(f"IN {ctx.rank} of {ctx.world_size}\\n", end="")

        train()
        print("BELOW")
        """,
    )

    ended = run_python(script, cwd=tmp_path)

    assert ended.code == 0, ended.text
    assert ended.out.count("ABOVE") == ended.out.count("RAW") == ended.out.count("BELOW") == 1
    assert ended.lines("IN") == ["IN 0 of 3", "IN 1 of 3", "IN 2 of 3"]
    assert sorted((tmp_path / "above.log").read_text().split()) == ["False", "True", "True"]


def test_arguments_are_those_of_the_launcher(tmp_path: Path) -> None:
    """A run directory named at random is one directory, on every rank."""
    script = write(
        tmp_path,
        """
        import dataclasses, random, threading
        from distribute import distributed

        @dataclasses.dataclass
        class Config:
            name: str

        @distributed(devices=2, returns="all")
        def train(ctx, config, lock, *, lr):
            with lock:
                return isinstance(config, Config), config.name, lr

        if __name__ == "__main__":
            config = Config(f"run-{random.random()}")
            values = train(config, threading.Lock(), lr=random.random())
            assert values[0] == values[1], values
            print("GOT", len(values), values[0][0], values[0][1] == config.name)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT 2 True True"]
    # The lock cannot be sent: the worker uses its own, and a warning names it.
    assert "argument `lock`: a thread lock (_thread.lock) cannot be sent" in ended.err


def test_later_calls_get_functions_and_globals_of_this_moment(tmp_path: Path) -> None:
    """The idle workers never ran the lines below the first call."""
    script = write(
        tmp_path,
        """
        from distribute import run

        LR = 0.1

        def first(ctx):
            return LR

        if __name__ == "__main__":
            print("FIRST", run(first, devices=2, returns="all"))
            LR = 0.5

            class Below:
                value = 7

            def second(ctx, one):
                return LR, one.value + Below.value, ctx.rank, ctx.world_size

            print("SECOND", run(second, Below(), devices=2, returns="all"))
            print("PLAN", run(first, devices=2, returns="all"))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("FIRST") == ["FIRST [0.1, 0.1]"]
    assert ended.lines("SECOND") == ["SECOND [(0.5, 14, 0, 2), (0.5, 14, 1, 2)]"]
    assert ended.lines("PLAN") == ["PLAN [0.5, 0.5]"]


def test_later_calls_get_what_the_script_has_set_in_its_modules(tmp_path: Path) -> None:
    """A function of a module goes by its name, to a rank that has the module as it was."""
    (tmp_path / "settings.py").write_text(
        dedent(
            """
            import dataclasses, enum, os, types

            class Mode(enum.Enum):
                FAST = 1
                SLOW = 2

            @dataclasses.dataclass
            class Config:
                lr: float = 0.1
                layers: list = dataclasses.field(default_factory=lambda: [1])

            lr = 0.1
            mode = Mode.FAST
            config = same = Config()
            names = types.SimpleNamespace(a=1, function=len)
            table = alias = {"a": (1, 2)}
            process = os.getpid()
            cache = {}
            large = dict.fromkeys(range(5_000))
            knot = [1]
            knot.append(knot)
            config.itself = config

            def train(ctx):
                cache[ctx.rank] = lr
                assert same is config and alias is table and names.function is len
                assert process == os.getpid() and list(cache) == [ctx.rank]
                return lr, mode is Mode.SLOW, config.lr, config.layers, names.a, table
            """
        )
    )
    script = write(
        tmp_path,
        """
        import settings
        from distribute import run
        from settings import config

        if __name__ == "__main__":
            print("FIRST", run(settings.train, devices=2, returns="all")[1])
            settings.lr, settings.mode = 0.2, settings.Mode.SLOW
            config.lr = 0.3
            config.layers.append(2)
            settings.names.a = 4
            settings.table["b"] = [5]
            try:
                run(lambda ctx, file: file, open(settings.__file__), devices=2)
            except ValueError:
                print("REFUSED")  # so nothing has been sent
            for _ in range(2):
                print("SECOND", *run(settings.train, devices=2, returns="all"), sep="\\n  ")
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("FIRST") == ["FIRST (0.1, False, 0.1, [1], 1, {'a': (1, 2)})"]
    assert ended.lines("REFUSED") == ["REFUSED"]
    later = "  (0.2, True, 0.3, [1, 2], 4, {'a': (1, 2), 'b': [5]})"
    assert [one for one in ended.out.splitlines() if one.startswith("  (")] == [later] * 4


def test_processes_that_come_to_different_calls_are_told_both(tmp_path: Path) -> None:
    """A script that branches by process does not hang."""
    script = write(
        tmp_path,
        """
        import distribute

        @distribute.distributed(devices=2)
        def train(ctx):
            return 1

        @distribute.distributed(devices=2)
        def evaluate(ctx):
            return 2

        if __name__ == "__main__":
            if distribute.is_worker():
                evaluate()
            train()
        """,
    )

    ended = run_python(script)

    assert ended.code == 1, ended.text
    assert "CallMismatch: rank 1 called `evaluate` (" in ended.err
    assert "s.py:13) while rank 0 called `train` (" in ended.err
    assert "s.py:14)" in ended.err


def test_a_worker_that_ends_its_script_before_the_call_is_an_error(tmp_path: Path) -> None:
    """Exit code 0 without having come to the call is not a success."""
    script = write(
        tmp_path,
        """
        import sys
        import distribute

        @distribute.distributed(devices=2)
        def train(ctx):
            return 1

        if __name__ == "__main__":
            if distribute.is_worker():
                sys.exit(0)
            train()
        """,
    )

    ended = run_python(script)

    assert ended.code == 1, ended.text
    assert "WorkerDied: rank 1 ended with exit code 0 before its script arrived at `train`" in (
        ended.err
    )


def test_a_worker_does_not_unwind_the_script(tmp_path: Path) -> None:
    """The script's own `finally` and `atexit` run once, in the launcher."""
    script = write(
        tmp_path,
        """
        import atexit
        from distribute import run

        def leave():
            with open("left.log", "a") as f:
                f.write("left\\n")

        def body(ctx):
            return ctx.world_size

        if __name__ == "__main__":
            atexit.register(leave)
            try:
                print("GOT", run(body, devices=3))
            finally:
                leave()
        """,
    )

    ended = run_python(script, cwd=tmp_path)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT 3"]
    assert (tmp_path / "left.log").read_text().splitlines() == ["left", "left"]


def test_objects_that_rank_0_touched_stay_touched(tmp_path: Path) -> None:
    """The launcher is rank 0: what its function changes needs no way back."""
    script = write(
        tmp_path,
        """
        import torch
        from distribute import run

        model = torch.nn.Linear(2, 1)
        history = []

        def body(ctx):
            wrapped = ctx.model(model)
            wrapped(torch.ones(4, 2)).sum().backward()
            history.append(ctx.world_size)
            return wrapped

        if __name__ == "__main__":
            returned = run(body, devices=2)
            print("GOT", history, model.weight.grad.tolist(), returned is model)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT [2] [[4.0, 4.0]] True"]


def test_one_process_first_then_more_goes_to_another_method(tmp_path: Path) -> None:
    """Re-exec serves a script's first call only; nothing is replayed."""
    script = write(
        tmp_path,
        """
        from distribute import distributed, run

        @distributed(devices=2)
        def body(ctx):
            print(f"IN {ctx.rank} of {ctx.world_size}\\n", end="")
            return ctx.world_size

        if __name__ == "__main__":
            print("METHOD", body.plan().method)
            print("GOT", run(body, devices=1))
            print("METHOD", body.plan().method)
            print("GOT", body())
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert [line for line in ended.out.splitlines() if line[:3] in ("GOT", "MET")] == [
        "METHOD reexec",
        "GOT 1",
        "METHOD fork",
        "GOT 2",
    ]
    assert ended.lines("IN") == ["IN 0 of 1", "IN 0 of 2", "IN 1 of 2"]


def test_an_interrupt_ends_the_call_once(tmp_path: Path) -> None:
    """Ctrl-C while rank 0 is in a collective, where Python's handler is not heard."""
    script = write(
        tmp_path,
        """
        import os, signal, threading, time, sys
        from distribute import run

        def interrupt():
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

        def body(ctx):
            if ctx.rank == 0:
                threading.Thread(target=interrupt).start()
                while True:
                    ctx.barrier()
            time.sleep(600)

        if __name__ == "__main__":
            try:
                run(body, devices=2, start_method=sys.argv[1])
            except KeyboardInterrupt as error:
                print("INTERRUPTED", error.__context__)
            print("NEXT", run(lambda ctx: ctx.world_size, devices=2))
        """,
    )

    ended = run_python(script, "reexec")

    assert ended.code == 0, ended.text
    assert ended.lines("INT") == ["INTERRUPTED None"]
    assert ended.lines("NEXT") == ["NEXT 2"]


@pytest.mark.slow
def test_what_a_later_call_cannot_send_is_the_ranks_own(tmp_path: Path) -> None:
    """A variable of the script that has no copy; a warning names it, and others are sent."""
    script = write(
        tmp_path,
        """
        import os, threading, warnings
        from distribute import RequestError, distributed

        LOCK = threading.Lock()
        rate = 1

        def helper():
            with LOCK:
                return rate

        @distributed(devices=2, returns="all")
        def train(ctx):
            return ctx.rank, ctx.world_size, helper(), os.getpid()

        @distributed(devices=2)
        def late(ctx):
            with AFTERWARDS:
                return 1

        first = train()
        rate = 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            second = train()
        print("PLAN", train.plan().method)
        print("SECOND", [one[:3] for one in second])
        print("SAME", [one[3] for one in first] == [one[3] for one in second])
        print("TOLD", [str(one.message).partition(" cannot")[0] for one in caught])
        try:
            train_with = distributed(devices=2)(lambda ctx, x: x)
            train_with(threading.Lock())
        except RequestError as error:
            print("ARGUMENT", str(error).partition(":")[0])
        AFTERWARDS = threading.Lock()
        try:
            late()
        except RequestError as error:
            print("LATE", str(error).partition(":")[0])
        print("AGAIN", [one[:3] for one in train()])
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("PLAN") == ["PLAN reexec"]
    assert ended.lines("SECOND") == ["SECOND [(0, 2, 2), (1, 2, 2)]"]
    assert ended.lines("SAME") == ["SAME True"]
    assert ended.lines("TOLD") == ["TOLD ['variable `LOCK` (lock)']"]
    assert ended.lines("LATE") == ["LATE variable `AFTERWARDS`"]
    assert ended.lines("ARGUMENT") == ["ARGUMENT argument `x`"]
    assert ended.lines("AGAIN") == ["AGAIN [(0, 2, 2), (1, 2, 2)]"]


def test_rank_0_does_not_wait_when_the_call_cannot_be_made(tmp_path: Path) -> None:
    """The other ranks have been started by then; the error arrives, and they are gone."""
    script = write(
        tmp_path,
        """
        from distribute import run

        class Moody:
            # For a look at why it cannot be pickled it can, and not for the call.
            looks = [False, True, False]

            def __reduce__(self):
                if Moody.looks and not Moody.looks.pop(0):
                    raise MemoryError("not now")
                return Moody, ()

        try:
            run(lambda ctx, moody: None, Moody(), devices=2)
        except MemoryError as error:
            print("CAUGHT", error)
        print("NEXT", run(lambda ctx: ctx.all_gather(ctx.rank), devices=2))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("CAUGHT") == ["CAUGHT not now"]
    assert ended.lines("NEXT") == ["NEXT [0, 1]"]


@pytest.mark.slow
def test_what_processes_share_by_inheriting_it_is_refused(tmp_path: Path) -> None:
    """Each rank would have a twin of its own otherwise, and nobody would hear of it."""
    script = write(
        tmp_path,
        """
        import multiprocessing
        from distribute import RequestError, run

        print("RUNS\\n", end="", flush=True)
        queue = multiprocessing.Queue()
        try:
            run(lambda ctx, config: None, {"queue": queue}, devices=2, start_method="reexec")
        except RequestError as error:
            print("REFUSED", error.given, "|", error.advice)
        queue.close()
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("REFUSED") == [
        "REFUSED argument `config['queue']` | it is for processes that inherit it: use "
        'start_method="fork"'
    ]
    assert ended.lines("RUNS") == ["RUNS"]


def test_a_model_that_rank_0_has_kept_is_the_module_after_the_call(tmp_path: Path) -> None:
    """The caller was rank 0: its model and context must wait for nobody, and train again."""
    script = write(
        tmp_path,
        """
        import torch
        from torch import nn
        from distribute import Context, RequestError, distributed

        class Trainer:
            def __init__(self):
                self.net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))

            @distributed(devices=2, returns="all")
            def fit(self, ctx: Context, rounds):
                self.net, self.ctx = ctx.model(self.net), ctx
                self.step(rounds)
                self.net(torch.randn(4, 2))  # a backward pass does not follow
                return ctx.world_size, self.weight()

            def step(self, rounds):
                optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
                for _ in range(rounds):
                    optimizer.zero_grad()
                    self.net(torch.randn(4, 2)).square().sum().backward()
                    optimizer.step()

            def weight(self):
                return self.net.state_dict()["1.weight"].tolist()

        if __name__ == "__main__":
            trainer = Trainer()
            for rounds in (3, 2):
                (size, first), (_, second) = trainer.fit(rounds)
                assert size == 2 and first == second == trainer.weight()
                trainer.step(2)
                assert trainer.weight() != first
            try:
                trainer.ctx.all_reduce(1)
            except RequestError as error:
                print("REFUSED", error)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert "the call of its context has ended" in ended.lines("REFUSED")[0]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_what_the_function_forks_ends_where_it_leaves_the_function(
    tmp_path: Path, strategy: str
) -> None:
    """By its own code, and with its own exception; it neither reports for the rank nor waits."""
    script = write(
        tmp_path,
        """
        import os, sys
        from distribute import run

        def forked(leave):
            child = os.fork()
            if child == 0:
                return leave()
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def fail():
            raise ValueError("the child's")

        def body(ctx):
            process, codes = os.getpid(), []
            for leave in (lambda: sys.exit(3), lambda: sys.exit("a text"), sys.exit, fail, int):
                code = forked(leave)
                if os.getpid() != process:
                    return None  # a child that does not end by itself
                codes.append(code)
            return ctx.all_gather_object(codes)

        print("CODES", run(body, devices=2, strategy=sys.argv[1], deadline=250))
        """,
    )

    ended = run_python(script, strategy)

    assert ended.code == 0, ended.text
    assert ended.lines("CODES") == [f"CODES {[[3, 1, 0, 1, 0]] * 2}"]
    assert ended.err.count("ValueError: the child's") == 2
    assert len(re.findall(r"^(\[1\] )?a text$", ended.err, re.M)) == 2
    assert "OSError" not in ended.err
