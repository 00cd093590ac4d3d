"""`notebook_launcher` in a real Jupyter kernel: what users see in their cells."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import Awaitable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 90.0


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a cell shows."""

    out: str
    err: str
    result: str
    displayed: list[str]
    error: str
    """The traceback, as the notebook shows it; empty when there was none."""


class Kernel:
    """One kernel that the tests of this file share, each with its own cells."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._notebook = nbformat.v4.new_notebook()
        self.client = NotebookClient(
            self._notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        self._setup = self.client.async_setup_kernel()
        self._do(self._setup.__aenter__())
        self.pid = int(self.run("import os; os.getpid()").result)

    def run(self, text: str, meanwhile: Coroutine[Any, Any, None] | None = None) -> Shown:
        """Execute a cell; ``meanwhile`` runs beside it."""
        cell = nbformat.v4.new_code_cell(textwrap.dedent(text))
        self._notebook.cells.append(cell)
        index = len(self._notebook.cells) - 1

        async def execute() -> str:
            try:
                await self.client.async_execute_cell(cell, index)
            except CellExecutionError as error:
                return str(error)
            return ""

        async def both() -> str:
            beside = [] if meanwhile is None else [meanwhile]
            said, *_ = await asyncio.gather(execute(), *beside)
            return str(said)

        error = self._do(both())
        return shown(cell, error)

    def descendants(self) -> list[psutil.Process]:
        """Processes that the kernel has started and that still run."""
        return [
            child
            for child in psutil.Process(self.pid).children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE
        ]

    def close(self) -> None:
        self._do(self._setup.__aexit__(None, None, None))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _do(self, work: Awaitable[T]) -> T:
        async def limited() -> T:
            return await asyncio.wait_for(work, LIMIT)

        return self._loop.run_until_complete(limited())


def shown(cell: nbformat.NotebookNode, error: str = "") -> Shown:
    outputs = cell["outputs"]
    streams = {
        name: "".join(o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == name)
        for name in ("stdout", "stderr")
    }
    results = [o["data"]["text/plain"] for o in outputs if o["output_type"] == "execute_result"]
    tracebacks = ["\n".join(o["traceback"]) for o in outputs if o["output_type"] == "error"]
    return Shown(
        out=streams["stdout"],
        err=streams["stderr"],
        result="".join(results),
        displayed=[o["data"]["text/plain"] for o in outputs if o["output_type"] == "display_data"],
        error=without_colours("\n".join(tracebacks)) or error,
    )


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture(scope="module")
def quiet_jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jupyter and IPython keep their files in a temporary folder."""
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(home / "runtime"))
        patch.setenv("JUPYTER_CONFIG_DIR", str(home / "config"))
        patch.setenv("IPYTHONDIR", str(home / "ipython"))
        # As on a user's machine: the number of threads is the library's to choose.
        patch.delenv("OMP_NUM_THREADS", raising=False)
        yield


@pytest.fixture(scope="module")
def kernel(quiet_jupyter: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    made = Kernel(tmp_path_factory.mktemp("notebook"))
    try:
        first = made.run(
            """
            import logging, os, signal, sys, time
            import torch
            from lockstep.launch.notebook import notebook_launcher

            logging.basicConfig(level=logging.INFO)   # its handler holds the kernel's own stream

            # A cell that computed with many threads, before anything is launched.
            torch.set_num_threads(4)
            matrix = torch.randn(1200, 1200)
            (matrix @ matrix).sum()
            torch.exp(torch.randn(4_000_000)).sum()
            torch.nn.Linear(400, 400)(torch.randn(2000, 400)).sum().backward()
            """
        )
        assert first.error == ""
        yield made
    finally:
        made.close()


def test_training_on_two_processes_returns_its_results(kernel: Kernel) -> None:
    kernel.run(
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def forward(self, x):
                return self.layer(x)

        def train(rate, steps):
            from lockstep import Accelerator

            accelerator = Accelerator()
            torch.set_num_threads(2)
            (matrix @ matrix).sum()      # multi-threaded here too
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
            loader = torch.utils.data.DataLoader(data, batch_size=4)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return accelerator.process_index, len(loader), accelerator.unwrap_model(model).state_dict()
        """
    )
    shown = kernel.run(
        """
        results = notebook_launcher(train, args=(0.1, 3), num_processes=2)
        same = all(torch.equal(results[0][2][name], results[1][2][name]) for name in results[0][2])
        [result[:2] for result in results], same
        """
    )
    assert shown.error == ""
    assert shown.result == "([(0, 4), (1, 4)], True)"
    assert kernel.descendants() == []


def test_what_ranks_write_arrives_in_the_cell(kernel: Kernel) -> None:
    shown = kernel.run(
        """
        def talk():
            rank = os.environ["RANK"]
            print(f"printed by {rank}")
            print(f"complained by {rank}", file=sys.stderr)
            logging.getLogger("mine").info("logged by %s", rank)
            os.write(1, f"native of {rank}\\n".encode())
            os.system(f"echo child of {rank}")
            display({"rank": rank})

        notebook_launcher(talk, num_processes=2);
        """
    )
    assert shown.error == ""
    for rank in range(2):
        assert f"printed by {rank}\n" in shown.out
        assert f"native of {rank}\n" in shown.out
        assert f"child of {rank}\n" in shown.out
        assert f"complained by {rank}\n" in shown.err
        assert f"INFO:mine:logged by {rank}\n" in shown.err
    assert sorted(shown.displayed) == ["{'rank': '0'}", "{'rank': '1'}"]


def test_progress_bars_are_text(kernel: Kernel) -> None:
    shown = kernel.run(
        """
        def count():
            import lockstep
            from tqdm.auto import tqdm

            lockstep.Accelerator()
            for _ in lockstep.tqdm(range(3), desc="ours"):
                pass
            for _ in tqdm(range(4), desc="theirs", disable=os.environ["RANK"] == "0"):
                pass
            return tqdm.__module__

        notebook_launcher(count, num_processes=2)
        """
    )
    assert shown.result == "['tqdm.asyncio', 'tqdm.asyncio']"
    assert "ours: 100%" in shown.err
    assert "theirs: 100%" in shown.err


def test_a_failing_ranks_traceback_is_in_the_cell(kernel: Kernel) -> None:
    shown = kernel.run(
        """
        def load(number):
            raise ValueError(f"sample {number} is broken")

        def train():
            from lockstep import Accelerator

            accelerator = Accelerator()
            if accelerator.process_index == 1:
                load(17)        # the line to be shown
            accelerator.wait_for_everyone()

        notebook_launcher(train, num_processes=2)
        """
    )
    assert "RankFailed: rank 1 of 2 failed: ValueError: sample 17 is broken" in shown.error
    assert "load(17)        # the line to be shown" in shown.error
    assert 'raise ValueError(f"sample {number} is broken")' in shown.error
    assert "  rank 0: " in shown.error
    # Our own frames are of no use to the reader.
    assert "forks.py" not in shown.error
    assert kernel.descendants() == []
    assert kernel.run("notebook_launcher(lambda: os.environ['RANK'], num_processes=2)").result == "['0', '1']"


def test_an_interrupt_ends_all_ranks(kernel: Kernel, tmp_path: Path) -> None:
    async def interrupt() -> None:
        while len(list(tmp_path.glob("started*"))) < 2:
            await asyncio.sleep(0.05)
        assert len(kernel.descendants()) >= 2
        await kernel.client.km.interrupt_kernel()

    shown = kernel.run(
        f"""
        def forever():
            from lockstep import Accelerator

            accelerator = Accelerator()
            open({str(tmp_path)!r} + f"/started{{accelerator.process_index}}", "w").close()
            try:
                while accelerator.process_index == 0:
                    time.sleep(0.01)
                accelerator.wait_for_everyone()      # waits for rank 0, which never comes
            finally:
                open({str(tmp_path)!r} + f"/cleaned{{accelerator.process_index}}", "w").close()

        notebook_launcher(forever, num_processes=2)
        """,
        meanwhile=interrupt(),
    )
    assert "KeyboardInterrupt" in shown.error
    assert kernel.descendants() == []
    assert (tmp_path / "cleaned0").exists()  # a rank can still put its things in order
    # The kernel is usable, and nothing of the launcher is left in it.
    state = kernel.run(
        """
        import threading
        [t.name for t in threading.enumerate() if "lockstep" in t.name], [n for n in os.environ if "RANK" in n]
        """
    )
    assert state.result == "([], [])"
    assert kernel.run("notebook_launcher(lambda: os.environ['RANK'], num_processes=2)").result == "['0', '1']"


def test_an_accelerator_in_the_kernel_is_refused_with_the_fix(kernel: Kernel) -> None:
    shown = kernel.run(
        """
        from lockstep import Accelerator
        accelerator = Accelerator()
        notebook_launcher(lambda: None, num_processes=2)
        """
    )
    assert "UsageError: An Accelerator (or PartialState) was made in this process already" in shown.error
    assert "Restart the kernel, and make the Accelerator inside the function" in shown.error
    # One process is the kernel itself: that goes on working.
    assert kernel.run("notebook_launcher(lambda: 5, num_processes=1)").result == "[5]"
    kernel.run("from lockstep import current; current.reset()")


def test_the_example_runs(quiet_jupyter: None, tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "the example is kept without outputs"
    client = NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    asyncio.run(client.async_execute())  # client.execute() leaves a loop behind
    cells = [shown(cell) for cell in notebook.cells if cell["cell_type"] == "code"]
    assert "training on 2 processes" in cells[-2].out
    assert cells[-1].result == "True"
