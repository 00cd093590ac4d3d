import json
import os
import subprocess
import sys

import pytest

from lockstep.cli import main
from lockstep.cli import numerics as command
from tests.unit.numerics.making import call, changed, small_run, stat, write


@pytest.fixture
def runs(tmp_path):
    frames = small_run()
    write(tmp_path / "a", frames)
    write(tmp_path / "b", changed(frames, 6, 2, abs_max=9.0))
    return tmp_path


def numerics(*words):
    return main(["numerics", *map(str, words)])


# ---------------------------------------------------------------- diff


def test_the_same_run_twice_is_no_difference(runs, capsys):
    assert numerics("diff", runs / "a", runs / "a") == 0
    assert capsys.readouterr().out == "No difference: 36 tensors in 3 batches compared, all within the tolerance.\n"


def test_two_runs_are_told_apart_by_exit_code_and_table(runs, capsys):
    assert numerics("diff", runs / "a", runs / "b") == 1
    out = capsys.readouterr().out
    assert "part in batch 1 on rank 0 at layer.2 (Linear), forward, output (abs max)." in out
    row = next(line for line in out.splitlines() if "layer.2" in line and "│" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("1", "0", "forward", "layer.2 (Linear)", "output", "abs max", "5.12e+00", "9.00e+00", "0.43", "1e-05")
    ]
    assert numerics("diff", runs / "a", runs / "b", "--rtol", "0.5") == 0


def test_json_holds_all_that_the_table_does(runs, capsys):
    write(runs / "c", changed(small_run(), 0, 0, abs_max=float("inf"), infs=True)[:-1])
    assert numerics("diff", runs / "a", runs / "c", "--json") == 1
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["parted"] is True
    assert told["first"] == told["differences"][0]
    assert (told["first"]["batch"], told["first"]["module"], told["first"]["tensor"]) == (0, "layer.0", "weight")
    assert told["first"]["second"]["abs_max"] == "inf"
    assert told["first"]["relative"] == "inf"
    assert numerics("diff", runs / "a", runs / "a", "--json") == 0
    assert json.loads(capsys.readouterr().out)["first"] is None


def test_two_batches_of_a_run_are_compared(runs, capsys):
    frames = [*small_run(2), call(149, "layer.0"), call(150, "layer.0", stat(high=70.0))]
    write(runs / "long", frames)
    assert numerics("diff", runs / "long", "--batches", 149, 150) == 1
    out = capsys.readouterr().out
    assert out.startswith("batch 149 and batch 150 part on rank 0 at layer.0 (Linear), forward, output (abs max).")
    assert numerics("diff", runs / "long", "--batches", 0, 1) == 0
    assert numerics("diff", runs / "long", "--batches", 0, 77) == 2
    assert "has no batch 77. It has 0-1, 149-150." in capsys.readouterr().err


def test_two_ranks_have_to_agree_on_parameters(runs, capsys):
    write(runs / "a", changed(small_run(), 5, 2, abs_max=99.0), rank=1)
    assert numerics("diff", runs / "a", "--ranks", 0, 1) == 0
    assert numerics("diff", runs / "a", "--ranks", 0, 1, "--all-tensors") == 1
    write(runs / "a", changed(small_run(), 5, 0, abs_max=99.0), rank=1)
    assert numerics("diff", runs / "a", "--ranks", 0, 1) == 1
    assert "rank 0 and rank 1 part in batch 1 at layer.1 (Linear), forward, weight" in capsys.readouterr().out
    assert numerics("diff", runs / "a", "--ranks", 0, 5) == 2
    assert "has no trace of rank 5, but of ranks 0-1" in capsys.readouterr().err


def test_files_of_other_ranks_can_be_compared_by_name(runs, capsys):
    write(runs / "c", small_run(), rank=4)
    assert numerics("diff", runs / "a" / "rank_0.jsonl", runs / "c" / "rank_4.jsonl") == 0
    assert numerics("diff", runs / "a", runs / "c") == 2
    assert "none in common" in capsys.readouterr().err


def test_other_world_sizes_are_said(runs, capsys):
    for rank in (0, 1):
        write(runs / "two", small_run(), rank=rank, world_size=2)
    assert numerics("diff", runs / "a", runs / "two") == 0
    assert "Note: 1 against 2 ranks: those of each run are taken together" in capsys.readouterr().out


def test_missing_modules_cut_traces_and_long_lists_are_said(runs, capsys):
    write(runs / "c", [frame for frame in small_run(1, modules=40) if frame.module != "layer.3"])
    assert numerics("diff", runs / "a", runs / "c", "--limit", "2") == 1
    out = capsys.readouterr().out
    assert "The numbers of what both have agree: 9 tensors in 1 batch compared." in out
    assert "layer.3 (Linear)  [batch 0, forward, rank 0]" in out
    assert "and 34 more" in out
    assert "Note: Only the first has batches 1-2." in out
    file = runs / "c" / "rank_0.jsonl"
    file.write_bytes(file.read_bytes()[:-60])
    numerics("diff", runs / "a", runs / "c")
    assert "the trace was not closed" in capsys.readouterr().out


def test_names_are_no_markup_of_the_terminal(runs, capsys):
    frames = [call(0, "[bold]x[/nope]", kind="[red]")]
    write(runs / "c", frames)
    write(runs / "d", changed(frames, 0, 0, abs_max=5.0))
    assert numerics("diff", runs / "c", runs / "d") == 1
    assert "[bold]x[/nope] ([red])" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diff", "a"], "Say what to compare RUN with"),
        (["diff", "a", "b", "--batches", "0", "1"], "Say what to compare RUN with"),
        (["diff", "a", "b", "--rtol", "-1"], "--rtol -1.0 must be 0 or more"),
        (["diff", "a", "b", "--rtol", "nan"], "--rtol nan must be 0 or more"),
        (["diff", "a", "nowhere"], "nowhere holds no trace: it does not exist"),
        (["diff", "a", "b", "--", "x"], "`diff` has no use for 'x'"),
        (["html", "a", "--rank", "3"], "has no trace of rank 3"),
        (["record", "a", "--", "train.py"], "holds a trace of rank 0 already"),
        (["record", "new"], "No script was given. It goes behind two dashes"),
        (["record", "new", "--every", "0", "--", "train.py"], "every=0 must be 1 or more"),
        (["record", "new", "--batches", "-3", "--", "train.py"], "must be 0 or more"),
    ],
)
def test_what_cannot_be_done_is_said_with_exit_code_2(runs, capsys, monkeypatch, words, said):
    monkeypatch.chdir(runs)
    assert numerics(*words) == 2
    assert said in capsys.readouterr().err


def test_runs_without_a_common_batch_are_refused(runs, capsys):
    write(runs / "c", [frame for frame in small_run(5) if frame.batch > 3])
    assert numerics("diff", runs / "a", runs / "c") == 2
    assert "have no batch in common. Only the first has batches 0-2. Only the second has batch 4." in (
        capsys.readouterr().err
    )


# ---------------------------------------------------------------- html


def test_the_page_lies_beside_the_trace_or_where_it_is_wanted(runs, capsys):
    assert numerics("html", runs / "a") == 0
    assert capsys.readouterr().out == f"{runs / 'a' / 'heatmap.html'}: 4 rows, 3 batches.\n"
    assert numerics("html", runs / "a" / "rank_0.jsonl", "-o", runs / "page.html", "--rank", "0") == 0
    assert (runs / "page.html").read_text().startswith("<!doctype html>")
    assert numerics("diff", runs / "a", runs / "a") == 0  # the page is no trace


# ---------------------------------------------------------------- record


class Started(Exception):
    """Stands for the process that takes our place: there is no coming back from it."""


def test_record_becomes_a_launch_with_the_setting(runs, capsys, monkeypatch):
    def execv(program, words):
        raise Started(words[1:])

    monkeypatch.setattr(command.os, "execv", execv)
    monkeypatch.chdir(runs)
    with pytest.raises(Started) as started:
        numerics("record", "new", "--batches", "5", "2", "--", "--cpu", "train.py", "--lr", "1", "--", "x")
    assert started.value.args[0] == [
        *("-m", "lockstep", "launch", "--numerics_record", f"{runs}/new@2,5"),
        *("--cpu", "train.py", "--lr", "1", "--", "x"),
    ]
    assert "Recording batches 2, 5 to" in capsys.readouterr().err
    with pytest.raises(Started) as started:
        numerics("record", "a", "--overwrite", "--every", "3", "--", "train.py")
    assert started.value.args[0][4] == f"{runs}/a@every=3"
    assert os.listdir(runs / "a") == []


def test_comparing_does_not_load_torch(runs):
    code = (
        "import sys; from lockstep.cli import main; code = main(['numerics', 'diff', 'a', 'b']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=runs, env=environ, timeout=60, capture_output=True)
    assert done.returncode == 1, done.stderr
