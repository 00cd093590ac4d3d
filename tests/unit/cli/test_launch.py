from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli import launch, main
from lockstep.config.launch import GROUPS, LaunchConfig
from lockstep.errors import ConfigError

OPTIONS = {option.name: option.metadata for option in fields(LaunchConfig)}
SCRIPT_ARGS = ["--lr", "3e-4", "--cpu", "-m", "--help", "--num_processes=7", "--", "-q"]


def value_for(name: str) -> str:
    """A text that the option accepts."""
    meta = OPTIONS[name]
    if "choices" in meta:
        return str(meta["choices"][0])
    return {int: "3", float: "1.5"}.get(meta["kind"], "word")


def read(*words: str) -> launch.Given:
    """What is read from words that nothing is wrong with."""
    found = launch.read(words)
    assert found.problems == []
    return found


def problems(*words: str) -> str:
    return "\n".join(launch.read(words).problems)


# --- flags -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "debug"])
@pytest.mark.parametrize("dash", ["_", "-"])
@pytest.mark.parametrize("equals", [True, False])
def test_every_flag_in_every_spelling(name: str, dash: str, equals: bool) -> None:
    flag = "--" + name.replace("_", dash)
    if OPTIONS[name]["kind"] is bool:
        words: list[str] = [f"{flag}=yes"] if equals else [flag]
        expected: Any = True
    else:
        text = value_for(name)
        words = [f"{flag}={text}"] if equals else [flag, text]
        expected = OPTIONS[name]["kind"](text)
    found = read(*words, "train.py", *SCRIPT_ARGS)
    assert found.flags == {name: expected}
    assert found.rest == ["train.py", *SCRIPT_ARGS]
    assert found.tokens == words


def test_a_switch_can_be_turned_off() -> None:
    assert read("--cpu=false", "--quiet=0", "train.py").flags == {"cpu": False, "quiet": False}
    assert "--cpu=maybe is unknown. Allowed: 1, true" in problems("--cpu=maybe", "train.py")


def test_short_flags() -> None:
    found = read("-q", "-t", "3", "-m", "package.train", "-q")
    assert found.flags == {"quiet": True, "tee": "3"}
    assert "module" in found.own
    assert found.rest == ["package.train", "-q"]
    assert read("-t=1", "train.py").flags == {"tee": "1"}


def test_what_the_own_switches_leave_of_the_command() -> None:
    found = read("--dry-run", "--json", "--config_file", "a.yaml", "--cpu", "--no-python", "bash", "-c", "x")
    assert found.own == {"dry_run": "yes", "json": "yes", "config_file": "a.yaml", "no_python": "yes"}
    assert found.tokens == ["--config_file", "a.yaml", "--cpu"]
    assert found.rest == ["bash", "-c", "x"]
    assert read("--dry_run=no", "train.py").own == {}


def test_a_double_dash_ends_the_flags() -> None:
    assert read("--cpu", "--", "--strange.py", "--cpu").rest == ["--strange.py", "--cpu"]
    assert read("train.py", "--", "x").rest == ["train.py", "--", "x"]
    assert read("--", "--").rest == ["--"]


@pytest.mark.parametrize(
    ("words", "debug", "rest"),
    [
        (["--debug", "train.py", "--arg1"], "true", ["train.py", "--arg1"]),
        (["--debug=underflow_overflow", "train.py"], "underflow_overflow", ["train.py"]),
        (["--debug", "underflow_overflow", "train.py"], "underflow_overflow", ["train.py"]),
        (["--debug", "collectives", "train.py"], "collectives", ["train.py"]),
        (["--debug=collectives,underflow_overflow", "train.py"], "collectives,underflow_overflow", ["train.py"]),
        (["--debug=false", "train.py"], "false", ["train.py"]),
        (["--debug", "--cpu", "train.py"], "true", ["train.py"]),
        (["--debug"], "true", []),
    ],
)
def test_debug_takes_no_value_but_a_tools_name(words: list[str], debug: str, rest: list[str]) -> None:
    found = read(*words)
    assert found.flags["debug"] == debug
    assert found.rest == rest


def test_an_unknown_tool_of_debug_is_refused_before_anything_starts() -> None:
    assert "--debug=underflow is unknown. Allowed: " in problems("--debug=underflow", "train.py")
    assert "collectives" in problems("--debug=underflow", "train.py")


words = st.text(alphabet="ab-_=. 0", max_size=6)


@given(st.lists(words, max_size=6))
def test_what_follows_the_script_is_never_looked_at(rest: list[str]) -> None:
    found = launch.read(["--cpu", "train.py", *rest])
    assert found.rest == ["train.py", *rest]
    assert (found.flags, found.problems) == ({"cpu": True}, [])


@given(st.lists(st.one_of(words, st.sampled_from(["-h", "--", "-m", *(f"--{name}" for name in OPTIONS)])), max_size=8))
@settings(max_examples=300)
def test_any_command_line_is_read_or_refused(argv: list[str]) -> None:
    found = launch.read(argv)
    assert found.rest == argv[len(argv) - len(found.rest) :]
    assert all(name in OPTIONS for name in found.flags)
    launch.make_parser(found.named).format_help()


flag_words = st.sampled_from(sorted(set(OPTIONS) - {"debug"})).flatmap(
    lambda name: st.sampled_from(
        [[f"--{name}"], [f"--{name}=1"]]
        if OPTIONS[name]["kind"] is bool
        else [[f"--{name}", value_for(name)], [f"--{name.replace('_', '-')}={value_for(name)}"]]
    )
)


@given(st.lists(flag_words, max_size=6), st.lists(words, max_size=4))
def test_flags_in_any_order(flags: list[list[str]], args: list[str]) -> None:
    argv = [word for flag in flags for word in flag]
    found = read(*argv, "train.py", *args)
    assert found.tokens == argv
    assert found.rest == ["train.py", *args]
    assert set(found.flags) == {flag[0].partition("=")[0][2:].replace("-", "_") for flag in flags}


# --- what is wrong -----------------------------------------------------------------------------------------------


def test_a_value_that_is_missing_does_not_swallow_the_next_flag() -> None:
    found = launch.read(["--gpu_ids", "--cpu", "--log_dir", "-q", "--num_processes"])
    assert found.flags == {"cpu": True, "quiet": True}
    assert [problem.partition(" ")[0] for problem in found.problems] == ["--gpu_ids", "--log_dir", "--num_processes"]
    assert all("needs a value" in problem for problem in found.problems)
    assert "--config_file needs a value (FILE)" in problems("--config_file")
    assert "help" in launch.read(["--num_processes", "-h"]).own


@pytest.mark.parametrize("text", ["two", "2.5", "", "nan"])
def test_what_is_no_number(text: str) -> None:
    assert f"--num_processes {text} is not a whole number." in problems(f"--num_processes={text}", "train.py")


@pytest.mark.parametrize("text", ["soon", "nan", "inf"])
def test_what_is_no_duration(text: str) -> None:
    assert f"--monitor_interval {text} is not a number." in problems("--monitor_interval", text, "train.py")


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--num_process", "num_processes"),
        ("--num-proceses=2", "num_processes"),
        ("--mixed_precison", "mixed_precision"),
        ("--dryrun", "dry_run"),
        ("--mulit_gpu", "multi_gpu"),
        ("-cpu", "cpu"),
        ("---cpu", "cpu"),
    ],
)
def test_a_mistyped_flag_is_refused_with_the_nearest(flag: str, nearest: str) -> None:
    text = problems(flag, "train.py")
    assert f"{flag.partition('=')[0]} is not an option of lockstep launch. Did you mean --{nearest}?" in text


def test_a_flag_like_nothing_of_ours() -> None:
    found = launch.read(["--xyzzy", "17", "train.py", "--cpu"])
    assert "--xyzzy is not an option" in found.problems[0]
    assert "lockstep launch -h" in found.problems[0]
    assert found.rest == ["train.py", "--cpu"]
    # Without a value of its own it does not swallow the script.
    assert launch.read(["--xyzzy", "train.py", "--cpu"]).rest == ["train.py", "--cpu"]
    assert launch.read(["--xyzzy", "bash"]).rest == ["bash"]


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["--nproc_per_node", "2"], "--num_processes"),
        (["--nproc-per-node=2"], "--num_processes"),
        (["--nnodes", "2"], "--num_machines"),
        (["--node_rank", "1"], "--machine_rank"),
        (["--master_addr", "host"], "--main_process_ip"),
        (["--master-port", "1"], "--main_process_port"),
        (["--standalone"], "one node is the default"),
    ],
)
def test_names_of_torchrun_are_translated(words: list[str], ours: str) -> None:
    found = launch.read([*words, "train.py"])
    assert ours in found.problems[0]
    assert "orchrun" in found.problems[0]
    assert found.rest == ["train.py"]


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        (["--use_fsdp"], "FSDP"),
        (["--fsdp_sharding_strategy", "FULL_SHARD"], "FSDP"),
        (["--fsdp-version=2"], "FSDP"),
        (["--use_deepspeed"], "DeepSpeed"),
        (["--zero_stage", "3"], "DeepSpeed"),
        (["--zero3_init_flag", "true"], "DeepSpeed"),
        (["--offload_optimizer_device", "cpu"], "DeepSpeed"),
        (["--deepspeed_config_file", "ds.json"], "DeepSpeed"),
        (["--gradient_clipping", "1.0"], "clip_grad_norm_"),
        (["--use_megatron_lm"], "Megatron-LM"),
        (["--megatron_lm_tp_degree", "2"], "Megatron-LM"),
        (["--use_parallelism_config"], "ParallelismConfig"),
        (["--parallelism_config_tp_size", "2"], "ParallelismConfig"),
        (["--tpu"], "TPU"),
        (["--tpu_use_sudo"], "TPU"),
        (["--no_tpu_cluster"], "TPU"),
        (["--downcast_bf16"], "TPU"),
        (["--vm", "one"], "TPU pods"),
        (["--env", "A=1"], "TPU pods"),
        (["--fp8_format", "HYBRID"], "fp8"),
        (["--aws_access_key_id", "x"], "SageMaker"),
    ],
)
def test_engines_that_are_not_built_are_refused(words: list[str], engine: str) -> None:
    found = launch.read([*words, "train.py", "--use_fsdp"])
    assert len(found.problems) == 1
    assert engine in found.problems[0]
    assert "not supported yet" in found.problems[0]
    assert found.rest == ["train.py", "--use_fsdp"]


def test_everything_wrong_is_said_at_once(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    argv = "launch --use_fsdp --num_proceses 2 --cpu --multi_gpu --mixed_precision fp8 --tee=x --json nothing.py"
    assert main(argv.split()) == 2
    error = capfd.readouterr().err
    for part in ("FSDP", "Did you mean --num_processes?", "--tee x is unknown", "--json needs --dry_run"):
        assert part in error
    argv = "launch --use_fsdp --cpu --multi_gpu --mixed_precision fp8 nothing.py"
    assert main(argv.split()) == 2
    error = capfd.readouterr().err
    for part in ("FSDP", "--cpu and --multi_gpu", "fp8 is not supported yet", "'nothing.py' does not exist"):
        assert part in error


@pytest.mark.parametrize("argv", [[], ["--cpu"], ["-m"], ["--"]])
def test_without_a_script(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"No script was given. Usage: lockstep launch"):
        launch.read(argv).target()


def test_module_and_program_contradict_each_other() -> None:
    found = launch.read(["-m", "--no_python", "x"])
    found.target()
    assert "contradict" in found.problems[0]


@pytest.mark.parametrize(("flag", "kind"), [("-m", "module"), ("--module", "module"), ("--no-python", "program")])
def test_what_kind_of_thing_is_run(flag: str, kind: str) -> None:
    target = read(flag, "thing", "--x").target()
    assert (target.kind, target.script, target.args) == (kind, "thing", ("--x",))


# --- help and plan -----------------------------------------------------------------------------------------------


def shown_groups(text: str) -> set[str]:
    return {group for group, title in GROUPS.items() if f"{title}:" in text}


def test_help_shows_every_flag_once() -> None:
    text = launch.make_parser(read("-h").named).format_help()
    assert shown_groups(text) == set(GROUPS)
    for name in (*OPTIONS, *launch._OWN):
        assert f"--{name}" in text.replace(",", " ").split() or f"--{name} " in text, name
    assert max(len(line) for line in text.splitlines()) <= 110


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        (["--multi_gpu", "-h"], {"hardware", "resources", "network"}),
        (["-h", "--multi-gpu"], {"hardware", "resources", "network"}),
        (["--cpu", "-h"], {"hardware", "resources", "network"}),
        (["--mixed_precision", "bf16", "--help"], {"precision"}),
        (["--debug", "-h"], {"debug"}),
        (["--use_fsdp", "-h"], {"paradigm"}),
        (["-q", "--debug", "-h"], {"output", "debug"}),
    ],
)
def test_help_with_flags_shows_their_groups(words: list[str], groups: set[str]) -> None:
    text = launch.make_parser(launch.read(words).named).format_help()
    assert shown_groups(text) == groups
    assert "General:" not in text


def test_help_after_the_script_is_the_scripts() -> None:
    assert "help" not in read("train.py", "-h").own


def test_help_and_refusals_do_not_import_torch() -> None:
    code = (
        "import sys; from lockstep.cli import main\n"
        "codes = [main(['launch', '-h']), main(['launch', '--cpu', 'no.py'])]\n"
        "print(codes, [name for name in sys.modules if name.partition('.')[0] in ('torch', 'numpy', 'psutil')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 2] []"


def test_a_dry_run_prints_and_starts_nothing(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w')")
    assert main(["launch", "--dry-run", "--cpu", "--num_processes", "2", "train.py", "--lr", "a b"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("torch.distributed elastic agent: 2 processes\n")
    for part in ("train.py --lr 'a b'", "LOCKSTEP_USE_CPU=true", "(flag --num_processes)"):
        assert part in text
    assert "bf16  (environment (LOCKSTEP_MIXED_PRECISION))" in text
    assert "LOCKSTEP_MIXED_PRECISION=" not in text  # inherited, not set
    assert main(["launch", "--dry-run", "--json", "--cpu", "train.py"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["kind"] == "alone"
    assert plan["options"]["cpu"] == {"value": True, "source": "flag --cpu"}
    assert plan["options"]["num_processes"] == {"value": None, "source": "default"}
    assert plan["argv"][1:] == ["-m", "lockstep.launch.worker", "train.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
