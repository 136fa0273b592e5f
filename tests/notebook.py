"""A notebook as a test sees it: a real kernel, and what each of its cells shows."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import re
import signal
import textwrap
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from tests.scripts import ROOT, tagged

# Jupyter's client makes it once and keeps it; so no test has left it.
ensure_event_loop()

HEAD = """
    import logging, os, sys, time
    import torch
    from distribute import distributed, run
    """


@dataclass
class Cell:
    """A cell that runs or has run.

    Attributes:
        stream: What it has written so far: `stdout` or `stderr`, and the text, as it came.
        shown: What it has displayed, by media type.
        value: The text of its last expression, or None.
        error: Name, text and traceback of its exception, or None.
        done: Whether it has ended.
    """

    stream: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    shown: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    value: str | None = None
    error: tuple[str, str, str] | None = None
    done: bool = False

    @property
    def out(self) -> str:
        return "".join(text for name, text in self.stream if name == "stdout")

    @property
    def err(self) -> str:
        return "".join(text for name, text in self.stream if name == "stderr")

    @property
    def lines(self) -> list[str]:
        """Whole lines of standard output, sorted."""
        assert self.out == "" or self.out.endswith("\n"), self.out
        return sorted(self.out.splitlines())


class Notebook:
    """A kernel of this interpreter; whatever it has started is gone some seconds after the block.

    Args:
        directory: Where it runs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tag = str(uuid.uuid4())
        self._cells: dict[str, Cell] = {}
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        self._environ = environ | {
            "CASE_TAG": self.tag,
            "PYTHONPATH": str(ROOT),
            "IPYTHONDIR": str(directory / "ipython"),
        }
        # A context of its own, so that no thread of it stays: other tests fork this process.
        self._context = zmq.Context()
        self._manager = KernelManager(
            context=self._context,
            connection_file=str(directory / "kernel.json"),
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        )

    def __enter__(self) -> Notebook:
        try:
            self._log = (self.directory / "kernel.log").open("w")
            self._manager.start_kernel(
                env=self._environ, cwd=str(self.directory), stdout=self._log, stderr=self._log
            )
            self._client = self._manager.client()
            # Where its heart has not beaten for a second, a client would make new sockets, and the
            # test that runs meanwhile would have left them.
            self._client.start_channels(hb=False)
            self._client.wait_for_ready(timeout=120)
            assert self.run(HEAD).error is None
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self._end()
        assert error is not None or not left, f"processes left: {left}"

    @property
    def pid(self) -> int:
        """Process id of the kernel."""
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def start(self, code: str) -> Cell:
        """Begins to run a cell; like a page, it can be asked for input."""
        message = self._client.execute(textwrap.dedent(code).strip("\n"), allow_stdin=True)
        return self._cells.setdefault(message, Cell())

    def run(self, code: str, seconds: float = 120) -> Cell:
        """Runs a cell to its end."""
        return self.finish(self.start(code), seconds)

    def value(self, code: str) -> str | None:
        """Returns what the last expression of a cell shows; fails if it fails."""
        cell = self.run(code)
        assert cell.error is None, cell.error[2]
        return cell.value

    def finish(self, cell: Cell, seconds: float = 120) -> Cell:
        """Waits for the end of a cell."""
        self.until(lambda: cell.done, cell, seconds)
        return cell

    def until(self, condition: Callable[[], bool], cell: Cell, seconds: float = 120) -> None:
        """Waits until a condition holds, and takes what the kernel says meanwhile."""
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, f"not within {seconds} s: {cell}"
            self.listen(0.05)

    def listen(self, seconds: float) -> None:
        """Takes what the kernel says."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            try:
                message = self._client.get_iopub_msg(timeout=left)
            except queue.Empty:
                return
            cell = self._cells.setdefault(message["parent_header"].get("msg_id", ""), Cell())
            self._note(cell, message["msg_type"], message["content"])

    def _note(self, cell: Cell, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            cell.stream.append((content["name"], content["text"]))
        elif kind == "display_data":
            cell.shown.append(content["data"])
        elif kind == "execute_result":
            cell.value = content["data"]["text/plain"]
        elif kind == "error":
            text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
            cell.error = content["ename"], content["evalue"], text
        elif kind == "status" and content["execution_state"] == "idle":
            cell.done = True

    def interrupt(self, *, group: bool) -> None:
        """Presses the stop button: SIGINT to the kernel, or to its process group."""
        (os.killpg if group else os.kill)(self.pid, signal.SIGINT)

    def restart(self) -> None:
        """Restarts the kernel, as the button does."""
        self._manager.restart_kernel(now=True)
        self._client.wait_for_ready(timeout=120)
        assert self.run(HEAD).error is None

    def processes(self) -> set[int]:
        """Returns all processes that come from this notebook, the kernel included."""
        return set(tagged(self.tag))

    def only(self, expected: set[int], seconds: float = 30) -> None:
        """Waits until there are no other processes than the expected ones."""
        limit = time.monotonic() + seconds
        while (left := self.processes()) - expected:
            assert time.monotonic() < limit, f"processes left: {left - expected}"
            time.sleep(0.02)

    def _end(self) -> list[int]:
        if hasattr(self, "_client"):
            self._client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_connection_file()
        self._context.destroy()
        self._log.close()
        limit = time.monotonic() + 30
        while (left := tagged(self.tag)) and time.monotonic() < limit:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


EXAMPLE = ROOT / "examples" / "notebook.ipynb"


def build() -> str:
    """Returns the text of the example, from the Markdown beside it: a cell for each block."""
    nbformat: Any = importlib.import_module("nbformat")
    text = EXAMPLE.with_suffix(".md").read_text()
    pieces = re.split(r"^```python(.*)\n((?:.*\n)*?)^```\n", text, flags=re.MULTILINE)
    cells: list[Any] = []
    while pieces:
        if prose := pieces.pop(0).strip():
            cells.append(nbformat.v4.new_markdown_cell(prose))
        if pieces:
            tags = re.findall(r'"(.*?)"', pieces.pop(0))
            code = pieces.pop(0).rstrip()
            marks = {"tags": tags} if tags else {}
            cells.append(nbformat.v4.new_code_cell(code, metadata=marks))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # not another one each time
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    made = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    return f"{nbformat.writes(made)}\n"


if __name__ == "__main__":
    EXAMPLE.write_text(build())
