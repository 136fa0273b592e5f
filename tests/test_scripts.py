"""Every way to start a program: what the ranks run there, and what they get.

Rank 1 of a script that can be run again runs the same script, with the interpreter's flags and
without the tool around it. Anywhere else the function is sent, and the plan says why.
"""

from __future__ import annotations

import json
import os
import py_compile
import shlex
import sys
import zipfile
from pathlib import Path

import pytest

from tests.scripts import ROOT, Ended, run_program, run_python, write

# Prints what was planned, what each rank saw, and once what stands below the call.
PROGRAM = f"""
    import sys
    sys.path.insert(0, {str(ROOT)!r})  # also with -I
    import json
    from distribute import RequestError, distributed, is_worker

    class Box:
        pass

    @distributed(devices=2, returns="all")
    def train(ctx, box):
        f = sys.flags
        print("IN " + json.dumps([
            ctx.rank, ctx.world_size, ctx.all_reduce(1), isinstance(box, Box),
            [f.optimize, f.utf8_mode, f.isolated, f.ignore_environment, f.inspect],
            sys.warnoptions, sys.executable,
        ]) + "\\n", end="", flush=True)
        return Box()

    @distributed(devices=2, start_method="reexec")
    def again(ctx):
        pass

    def main():
        print("ABOVE")
        if not is_worker():
            plan = train.plan()
            print("PLAN", json.dumps([plan.method, plan.reason, list(plan.command)]), flush=True)
            try:
                again.plan()
            except RequestError as error:
                print("REFUSED", error)
        boxes = train(Box())
        print("BELOW", [type(one) is Box for one in boxes])
    """
SCRIPT = PROGRAM + "\n    if __name__ == '__main__':\n        main()\n"
PLAIN = [0, 0, 0, 0, 0]


def check(ended: Ended, method: str, reason: str = "", command: list[str] | None = None) -> None:
    """Two ranks met, knew the script's classes, and what is below the call ran once."""
    assert ended.code == 0, ended.text
    assert ended.lines("ABOVE") == ["ABOVE"]
    found, why, again = planned(ended)
    assert found == method, why
    assert reason in why
    refused = ended.lines("REFUSED")
    if method == "reexec":
        assert refused == []
        if command is not None:
            assert again == command
    else:
        assert len(refused) == 1
        assert f"REFUSED start method 'reexec': {why.partition(', and other ')[0]}; " in refused[0]
        assert again == []
    seen = ranks(ended)
    assert [one[:4] for one in seen] == [[0, 2, 2, True], [1, 2, 2, True]]
    assert ended.lines("BELOW") == ["BELOW [True, True]"]


def planned(ended: Ended) -> tuple[str, str, list[str]]:
    (line,) = ended.lines("PLAN")
    method, reason, command = json.loads(line[5:])
    return method, reason, command


def ranks(ended: Ended) -> list[list[object]]:
    """What each rank printed, in rank order."""
    return [json.loads(line[3:]) for line in ended.lines("IN")]


slow = pytest.mark.slow


# -- scripts, packages, applications -------------------------------------------------------------


@slow
@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        ("-O -X utf8 -W ignore -u", [1, 1, 0, 0, 0]),
        ("-OO -E -Xutf8 -Wignore", [2, 1, 0, 1, 0]),
        ("-I -uX utf8 -W ignore", [0, 1, 1, 1, 0]),
    ],
)
def test_the_interpreter_s_flags(tmp_path: Path, flags: str, seen: list[int]) -> None:
    """Asserts, encodings and warnings would differ between the ranks."""
    script = write(tmp_path, SCRIPT)

    ended = run_python(*flags.split(), script, "a", cwd=tmp_path)

    check(ended, "reexec", command=[sys.executable, *flags.split(), str(script), "a"])
    assert [one[4:6] for one in ranks(ended)] == [[seen, ["ignore"]]] * 2


@pytest.mark.parametrize("kind", ["zip", pytest.param("directory", marks=slow)])
def test_an_application(tmp_path: Path, kind: str) -> None:
    """`python app.zip`, `python app/`: there is no module of that name, and no such script."""
    main = write(tmp_path, SCRIPT, "app/__main__.py")
    name = "app/"
    if kind == "zip":
        name = "app.zip"
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            file.write(main, "__main__.py")
        main.unlink()

    ended = run_python(name, "a", cwd=tmp_path)

    check(ended, "reexec", command=[sys.executable, name, "a"])


@slow
@pytest.mark.parametrize("module", ["pkg", "pkg.mod"])
def test_a_module(tmp_path: Path, module: str) -> None:
    write(tmp_path, "", "pkg/__init__.py")
    for name in ("__main__", "mod"):
        write(tmp_path, SCRIPT, f"pkg/{name}.py")

    ended = run_python("-m", module, "a", cwd=tmp_path)

    check(ended, "reexec", command=[sys.executable, "-m", module, "a"])


@slow
def test_spaces_quotes_and_a_linked_interpreter(tmp_path: Path) -> None:
    """The ranks run the interpreter that was started, under the name by which it was started."""
    script = write(tmp_path, SCRIPT, 'it\'s "here"/my script.py')
    link = tmp_path / "py thon"
    link.symlink_to(sys.executable)
    # The link is outside the virtual environment: what is installed there is found like this.
    path = os.pathsep.join([str(ROOT), *(one for one in sys.path if one.endswith("-packages"))])

    ended = run_program(
        [str(link), str(script), 'a "b', "$X"], cwd=tmp_path, environ={"PYTHONPATH": path}
    )

    check(ended, "reexec", command=[str(link), str(script), 'a "b', "$X"])
    assert [one[6] for one in ranks(ended)] == [str(link)] * 2


@slow
def test_a_prompt_after_the_script_is_the_launcher_s_alone(tmp_path: Path) -> None:
    """PYTHONINSPECT in a worker would end it at a prompt."""
    ended = run_python(write(tmp_path, SCRIPT), cwd=tmp_path, environ={"PYTHONINSPECT": "1"})

    check(ended, "reexec")
    assert [one[4] for one in ranks(ended)] == [[0, 0, 0, 0, 1], PLAIN]


@slow
@pytest.mark.parametrize("start", ["chd.py", "sub/chd.py", "-m chd", "-m sub.chd"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_another_directory(tmp_path: Path, start: str, when: str) -> None:
    """The script has changed it before this library was imported, or afterwards."""
    script = f"""
    import os, sys
    sys.path.append({str(ROOT)!r})
    if {when == "after"}:
        import distribute
    os.makedirs("runs", exist_ok=True)
    os.chdir("runs")
    from distribute import distributed
    @distributed(devices=2, returns="all")
    def train(ctx):
        return os.getcwd()
    print("GOT", train.plan().method, train())
    """
    write(tmp_path, script, "sub/chd.py" if "sub" in start else "chd.py")

    ended = run_python(*start.split(), cwd=tmp_path)

    here = str(tmp_path / "runs")
    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == [f"GOT reexec {[here, here]}"]
    assert not (tmp_path / "runs" / "runs").exists()


@slow
def test_arguments_that_the_script_takes_away(tmp_path: Path) -> None:
    """Wrappers of argparse and absl leave a shorter list; the ranks start with the whole one."""
    script = write(
        tmp_path,
        """
        import sys
        from distribute import distributed
        taken = sys.argv[1:]
        del sys.argv[1:]

        @distributed(devices=2, returns="all")
        def train(ctx):
            return taken, sys.argv[1:]

        print("GOT", train.plan().method, train())
        """,
    )

    ended = run_python(script, "--lr", "1")

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT reexec [(['--lr', '1'], []), (['--lr', '1'], [])]"]


def test_variables_that_the_script_sets_and_takes_away(tmp_path: Path) -> None:
    """A run's identifier is one; a secret that is taken out of the environment is there again."""
    script = write(
        tmp_path,
        """
        import os, uuid
        from distribute import distributed
        token = os.environ.pop("TOKEN")
        run = os.environ.setdefault("RUN_ID", str(uuid.uuid4()))

        @distributed(devices=2, returns="all")
        def train(ctx):
            return run, token, "TOKEN" in os.environ

        (one, *rest), (two, *others) = train()
        print("GOT", train.plan().method, one == two, rest, others)
        """,
    )

    ended = run_python(script, environ={"TOKEN": "secret"})

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT reexec True ['secret', False] ['secret', False]"]


# -- command-line programs -----------------------------------------------------------------------


@slow
@pytest.mark.parametrize("front", ["click", "fire"])
def test_a_front_end(tmp_path: Path, front: str) -> None:
    """It reads `sys.argv` in every process, calls the function in its own way, and may exit."""
    call = {
        "click": """
        @click.group()
        def cli(): pass

        @cli.command()
        @click.option("--lr", type=float)
        @click.pass_context
        def fit(ctx, lr):
            print("GOT", train(lr))

        cli()
        """,
        "fire": """
        class Tool:
            def fit(self, lr):
                print("GOT", train(lr))

        fire.Fire(Tool)
        """,
    }[front]
    script = write(
        tmp_path,
        f"""
        import {front}
        from distribute import distributed

        @distributed(devices=2, returns="all")
        def train(ctx, lr):
            return ctx.rank, ctx.world_size, lr

        print("PLAN", train.plan().method)
        """
        + call,
    )

    ended = run_python(script, "fit", "--lr", "2.5")

    assert ended.code == 0, ended.text
    assert ended.lines("PLAN") == ["PLAN reexec"]
    assert ended.lines("GOT") == ["GOT [(0, 2, 2.5), (1, 2, 2.5)]"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with two console scripts, installed by pip: one is the program, one runs others."""
    source = tmp_path_factory.mktemp("source")
    write(
        source,
        """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"
        [project]
        name = "toolpkg"
        version = "1"
        [project.scripts]
        mytool = "toolpkg.cli:main"
        myhost = "toolpkg.host:main"
        [tool.setuptools]
        packages = ["toolpkg"]
        """,
        "pyproject.toml",
    )
    write(source, "", "toolpkg/__init__.py")
    write(source, PROGRAM, "toolpkg/cli.py")
    write(
        source,
        """
        import importlib, sys
        def main():
            sys.path.insert(0, "")
            getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()
        """,
        "toolpkg/host.py",
    )
    target = tmp_path_factory.mktemp("target") / "site-packages"
    done = run_python(
        *("-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"),
        *("--target", target, source),
        environ={"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"},
    )
    assert done.code == 0, done.text
    return target


def found_in(target: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(target)])}


@slow
def test_a_console_script(tmp_path: Path, installed: Path) -> None:
    """`mytool fit`: what is in `bin` is a stub, and the function is in the package."""
    stub = installed / "bin" / "mytool"

    ended = run_program([str(stub), "fit"], cwd=tmp_path, environ=found_in(installed))

    check(ended, "reexec", command=[sys.executable, str(stub), "fit"])


@slow
def test_an_installed_program_that_runs_what_is_not_installed(
    tmp_path: Path, installed: Path
) -> None:
    """A server or a task queue: run again it would not come to this call, or to another task."""
    write(tmp_path, PROGRAM, "jobs.py")

    ended = run_program(
        [str(installed / "bin" / "myhost"), "jobs", "main"],
        cwd=tmp_path,
        environ=found_in(installed),
    )

    check(ended, "fork", "the program is myhost, which hosts the code that makes the call")


@slow
def test_a_worker_of_joblib(tmp_path: Path) -> None:
    """Its worker processes have a command line of their own, and their tasks in a pipe."""
    script = write(
        tmp_path,
        """
        import joblib
        from distribute import distributed

        def job(number):
            @distributed(devices=2)
            def train(ctx):
                return ctx.all_reduce(number)
            return train.plan().method, train.plan().reason, train()

        if __name__ == "__main__":
            for one in joblib.Parallel(n_jobs=2)(joblib.delayed(job)(n) for n in (1, 2)):
                print("GOT", one)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    one, two = ended.lines("GOT")
    for line, total in ((one, 2), (two, 4)):
        assert line.startswith(("GOT ('fork', ", "GOT ('forkserver', "))
        assert "this is a child process of multiprocessing" in line
        assert line.endswith(f", {total})")


# -- tools around the script ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "behind"),
    [
        ("-m cProfile -o out.prof", ""),
        pytest.param("-Om cProfile -o out.prof", "-O", marks=slow),
        pytest.param("-m cProfile -o out.prof -m", "-m", marks=slow),
        pytest.param("-m profile -o out.prof", "", marks=slow),
        pytest.param("-Xutf8 -m trace --count -C counts", "-Xutf8", marks=slow),
        pytest.param("-m pdb -c continue -c q", "", marks=slow),
        pytest.param("-m pdb -c continue -c q -m", "-m", marks=slow),
        pytest.param("-m coverage run --data-file=x", "", marks=slow),
        pytest.param("-W ignore -m coverage run -m", "-W ignore -m", marks=slow),
        pytest.param("-m debugpy --listen 0", "", marks=slow),
        pytest.param("-m kernprof -l", "", marks=slow),
    ],
)
def test_a_tool_around_the_script(tmp_path: Path, tool: str, behind: str) -> None:
    """Rank 0 is profiled or debugged; the other ranks run the script itself.

    Their classes are the script's, although the tool may have hidden it from `sys.modules`.
    """
    write(tmp_path, SCRIPT, "pkg/mod.py")
    name = "pkg.mod" if tool.endswith("-m") else "pkg/mod.py"

    ended = run_python(*tool.split(), name, "a", "--lr", cwd=tmp_path)

    check(ended, "reexec", command=[sys.executable, *behind.split(), name, "a", "--lr"])
    assert (tmp_path / "out.prof").exists() is ("out.prof" in tool)
    if "out.prof" in tool:
        # The function ran under the profiler, in this process.
        listed = run_python(
            "-c", "import pstats; pstats.Stats('out.prof').print_stats('mod.py.*train')",
            cwd=tmp_path,
        )  # fmt: skip
        assert "(train)" in listed.out


@slow
def test_a_tool_that_changes_the_programs_it_starts(tmp_path: Path) -> None:
    """viztracer puts itself before every Python; the function is sent to forks."""
    write(tmp_path, SCRIPT)

    ended = run_python(
        *("-m", "viztracer", "--tracer_entries", "1000", "--output_file", "v.json"),
        *("--", "s.py", "a"),
        cwd=tmp_path,
    )

    check(ended, "fork", "the program is viztracer, which hosts the code that makes the call")


@slow
def test_a_tool_that_is_told_the_script_otherwise(tmp_path: Path) -> None:
    """The command line of the tool does not end with the script's: which it is, is not known."""
    write(tmp_path, "import sys; sys.argv.append('more')\n" + SCRIPT.replace("\n    ", "\n"))

    ended = run_python("-m", "pdb", "-c", "continue", "-c", "q", "s.py", cwd=tmp_path)

    check(ended, "fork", "the program is pdb, which hosts the code that makes the call")


@slow
def test_a_debugger_that_somebody_types_at(tmp_path: Path) -> None:
    """A breakpoint in the function stops rank 0, also when the program is run a second time."""
    script = write(
        tmp_path,
        """
        from distribute import distributed

        @distributed(devices=2)
        def train(ctx):
            total = ctx.all_reduce(ctx.rank + 1)
            return total  # here

        print("GOT", train.plan().method, train())
        """,
    )
    typed = "break 6\ncontinue\np 'TOTAL', ctx.rank, total\nclear 1\ncontinue\ncontinue\nq\n"

    ended = run_python("-m", "pdb", script, stdin=typed, cwd=tmp_path)

    assert "('TOTAL', 0, 3)" in ended.out, ended.text
    # The second time round it is a later call of the same process.
    assert ended.out.count("GOT reexec 3") == 2, ended.text


@slow
def test_coverage_of_the_other_ranks(tmp_path: Path) -> None:
    """By coverage's own support of subprocesses, and of the way in which workers leave."""
    write(
        tmp_path,
        """
        from distribute import distributed

        @distributed(devices=2)
        def train(ctx):
            if ctx.rank == 1:
                where = "only rank 1 is here"
            return ctx.all_reduce(1)

        print("GOT", train.plan().method, train())
        """,
    )
    write(tmp_path, "[run]\npatch = subprocess, _exit\n", ".coveragerc")

    ended = run_python("-m", "coverage", "run", "s.py", cwd=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT reexec 2"]

    assert run_python("-m", "coverage", "combine", "-q", cwd=tmp_path).code == 0
    report = run_python("-m", "coverage", "json", "-o", "-", "-q", cwd=tmp_path)
    assert json.loads(report.out)["files"]["s.py"]["missing_lines"] == []


# -- what is not run again -----------------------------------------------------------------------


@slow
@pytest.mark.parametrize("sweep", [False, True], ids=["single", "multirun"])
def test_hydra(tmp_path: Path, sweep: bool) -> None:
    """A script that is run again makes further run directories, or the whole sweep once more."""
    script = write(
        tmp_path,
        """
        import os
        import hydra
        from distribute import RequestError, distributed

        @distributed(devices=2, returns="all")
        def train(ctx, lr):
            return ctx.rank, ctx.all_reduce(lr)

        @hydra.main(version_base=None, config_path=None)
        def main(cfg):
            print("PLAN", train.plan().method, train.plan().reason)
            try:
                distributed(devices=2, start_method="reexec")(train.__wrapped__)(cfg.lr)
            except RequestError as error:
                print("REFUSED", error)
            print("GOT", train(cfg.lr))

        main()
        """,
    )
    rates = ["1", "2"] if sweep else ["1"]

    ended = run_python(script, *["-m"] * sweep, f"+lr={','.join(rates)}", cwd=tmp_path)

    why = "hydra runs this, and would run its job, or the whole sweep, again"
    assert ended.code == 0, ended.text
    assert ended.lines("PLAN") == [f"PLAN fork {why}"] * len(rates)
    assert ended.lines("REFUSED") == [
        f"REFUSED start method 'reexec': {why}; leave the start method to \"auto\""
    ] * len(rates)
    assert ended.lines("GOT") == [
        f"GOT [(0, {2 * int(one)}), (1, {2 * int(one)})]" for one in rates
    ]
    made = [path.parent for path in tmp_path.rglob(".hydra")]
    assert len(made) == len(rates), made


@slow
@pytest.mark.parametrize("start", ["s.py", "-m unittest s", "-m pytest -q -s s.py"])
def test_a_test_runner(tmp_path: Path, start: str) -> None:
    """The tests run once, also where the test file is the program."""
    write(
        tmp_path,
        SCRIPT.partition("\n    if __name__")[0]
        + """
    import unittest

    class Test(unittest.TestCase):
        def test_main(self):
            with open("ran", "a") as f:
                f.write("x")
            main()

    if __name__ == "__main__":
        unittest.main()
        """,
    )

    ended = run_python(*start.split(), cwd=tmp_path, environ={"PYTHONDONTWRITEBYTECODE": "1"})

    check(ended, "fork", "unittest runs this, and would run its tests again")
    assert (tmp_path / "ran").read_text() == "x"


@slow
def test_a_text_with_examples(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import doctest
        from distribute import distributed

        @distributed(devices=2)
        def train(ctx):
            '''
            >>> print(train.plan().method, train.plan().reason)
            fork doctest runs this, and would run its tests again
            >>> train()
            2
            '''
            return ctx.all_reduce(1)

        print("GOT", doctest.testmod())
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT TestResults(failed=0, attempted=2)"], ended.text


STUDY = """
    import sys
    import optuna
    from distribute import distributed, workers

    @distributed(devices=2, accelerator="cpu", seed=0)
    def train(ctx, lr):
        assert ctx.world_size == 2
        return ctx.all_reduce(lr * (ctx.rank + 1))

    def objective(trial):
        reasons.add(train.plan().reason)
        lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        value = train(lr)
        assert value == lr + lr * 2
        trial.report(value, step=0)
        if trial.should_prune():
            raise optuna.TrialPruned
        return value

    reasons = set()
    study = optuna.create_study(
        storage="sqlite:///study.db",
        study_name="s",
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=1),
    )
    study.optimize(objective, n_trials=3, n_jobs=int(sys.argv[1]))
    print("GOT", *reasons)
    print("TRIALS", len(study.trials), study.best_value == 3 * study.best_params["lr"])
    """


@slow
@pytest.mark.parametrize(
    ("jobs", "why"),
    [
        (1, "Optuna runs this, and would run its trials again"),
        (2, "the call comes from a thread other than the main one"),
    ],
)
def test_a_study_of_optuna(tmp_path: Path, jobs: int, why: str) -> None:
    """A script that is run again would add trials of its own to a study that is stored."""
    script = write(tmp_path, STUDY)

    ended = run_python(script, str(jobs), cwd=tmp_path)

    assert ended.code == 0, ended.text
    assert ended.lines("TRIALS") == ["TRIALS 3 True"], ended.text
    (reason,) = ended.lines("GOT")
    assert why in reason


@slow
def test_a_program_that_runs_a_script_as_main(tmp_path: Path) -> None:
    """What was started is not what is `__main__`."""
    write(tmp_path, SCRIPT)
    write(tmp_path, "import runpy; runpy.run_path('s.py', run_name='__main__')", "runner.py")

    ended = run_python("runner.py", cwd=tmp_path)

    check(ended, "fork", "the program is runner, which hosts the code that makes the call")


@slow
def test_a_script_from_a_pipe(tmp_path: Path) -> None:
    """`python <(...)`: nobody can read it again."""
    script = write(tmp_path, SCRIPT)
    line = f"exec {shlex.quote(sys.executable)} <(cat {shlex.quote(str(script))})"

    ended = run_program(["bash", "-c", line], cwd=tmp_path)

    check(ended, "fork", "there is no script on disk")


@slow
@pytest.mark.parametrize("how", ["os.fork", "daemonic"])
def test_a_child_of_the_program(tmp_path: Path, how: str) -> None:
    """It is not what the command line starts."""
    child = {
        "os.fork": "\n    if os.fork() == 0:\n        main()\n        os._exit(0)\n    os.wait()\n",
        "daemonic": """
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=main, daemon=True)
    child.start()
    child.join()
    """,
    }[how]
    script = write(tmp_path, "    import multiprocessing, os\n" + PROGRAM + child)
    why = {
        "os.fork": "this process is a fork of the one that was started",
        "daemonic": "this is a child process of multiprocessing",
    }[how]

    ended = run_python(script, environ={"PYTHONUNBUFFERED": "1"})

    check(ended, "fork", why)


@slow
def test_a_frozen_program(tmp_path: Path) -> None:
    """Its `sys.executable` is itself. (What freezes programs sets `sys.frozen`.)"""
    script = write(tmp_path, "    import sys\n    sys.frozen = True\n" + SCRIPT)

    check(run_python(script), "fork", "a frozen program has no script to run again")


@slow
def test_a_frozen_program_without_sources(tmp_path: Path) -> None:
    """PyInstaller's are bytecode under names of their own; errors show the caller's lines alone."""
    source, compiled = ROOT / "distribute", tmp_path / "app" / "distribute"
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source)
        target = (compiled / name).with_suffix(".pyc")
        py_compile.compile(str(path), str(target), f"distribute/{name}", doraise=True)
    script = write(
        tmp_path,
        """
        import sys
        sys.frozen = True
        from distribute import distributed

        @distributed(devices=2, accelerator="cpu")
        def train(ctx, lr):
            if lr > 1:
                raise ValueError(f"lr on {ctx.world_size} ranks")
            return ctx.all_gather((ctx.rank, lr))

        print("GOT", train.plan().method, train(0.5), train(0.7))
        try:
            train(2.0)
        except ValueError as error:
            print("GOT", error)
            print("\\n".join(str(error.__cause__).splitlines()))
        """,
        "app/s.py",
    )

    ended = run_python("-P", script, cwd=tmp_path, environ={"PYTHONPATH": str(tmp_path / "app")})

    assert ended.code == 0, ended.text
    assert "GOT fork [(0, 0.5), (1, 0.5)] [(0, 0.7), (1, 0.7)]" in ended.out, ended.text
    assert "GOT lr on 2 ranks" in ended.out
    assert f'File "{script}", line 8, in train' in ended.out
    assert "distribute/" not in ended.out.partition("GOT lr")[2], ended.text


# -- above the call ------------------------------------------------------------------------------

ABOVE = """
    import sys
    print("FIRST")  # before this library is known
    from distribute import distributed, is_worker

    @distributed(devices=2)
    def train(ctx):
        return ctx.world_size

    print("ABOVE")
    if is_worker() and len(sys.argv) > 1:
        print("no such data set")
        sys.exit(int(sys.argv[1]))
    print("GOT", train())
    """


@pytest.mark.slow
@pytest.mark.parametrize(("value", "shown"), [("", []), ("1", ["[1] ABOVE", "[1] FIRST"])])
def test_what_workers_print_above_the_call(tmp_path: Path, value: str, shown: list[str]) -> None:
    """It is not shown, unless a variable asks for it."""
    ended = run_python(write(tmp_path, ABOVE), environ={"DISTRIBUTE_SHOW_ALL": value})

    assert ended.code == 0, ended.text
    assert sorted(ended.out.splitlines()) == sorted(["FIRST", "ABOVE", "GOT 2", *shown])


@slow
@pytest.mark.parametrize("code", ["0", "3"])
def test_what_a_worker_printed_before_it_left_is_in_the_error(tmp_path: Path, code: str) -> None:
    """Also of standard output, which is not shown."""
    ended = run_python(write(tmp_path, ABOVE), code)

    assert ended.code == 1, ended.text
    assert f"WorkerDied: rank 1 ended with exit code {code} before its script arrived" in ended.err
    assert "The last lines of its output:\n  FIRST\n  ABOVE\n  no such data set\n" in ended.err
    assert "no such data set" not in ended.out


@slow
def test_much_output_above_the_call_does_not_hold_a_worker_up(tmp_path: Path) -> None:
    """More than a pipe takes."""
    script = write(
        tmp_path,
        """
        from distribute import distributed

        for _ in range(20_000):
            print("x" * 99)

        @distributed(devices=2)
        def train(ctx):
            return ctx.world_size

        print("GOT", train())
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.out.count("x" * 99) == 20_000
    assert ended.lines("GOT") == ["GOT 2"]


@slow
def test_a_stray_variable_is_named(tmp_path: Path) -> None:
    """`LOCAL_RANK` alone, as some images have it, makes no rank, and the plan tells."""
    ended = run_python(write(tmp_path, SCRIPT), environ={"LOCAL_RANK": "0"})

    check(ended, "reexec", "LOCAL_RANK is set without RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT")
