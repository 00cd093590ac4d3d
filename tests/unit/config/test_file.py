"""Configuration files: what each key becomes, what is ignored and refused, and what is said about mistakes."""

from __future__ import annotations

import json
import os
import re
import stat
import textwrap
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from lockstep.config import file, file_keys
from lockstep.config.file import ConfigFile
from lockstep.config.launch import LaunchConfig
from lockstep.errors import ConfigError

Read = Callable[[str], ConfigFile]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def reading(text: str, name: str = "config.yaml") -> ConfigFile:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return file.read(path)

    return reading


@pytest.fixture
def wrong(read: Read, tmp_path: Path) -> Callable[[str], str]:
    """What is said about a file, with its path shortened."""

    def reading(text: str) -> str:
        with pytest.raises(ConfigError) as error:
            read(text)
        return str(error.value).replace(str(tmp_path / "config.yaml"), "FILE")

    return reading


# ---------------------------------------------------------------- the place


def test_the_file_is_looked_for_where_accelerate_writes_it(tmp_path: Path) -> None:
    name = Path("accelerate", "default_config.yaml")
    home = {"HOME": "/home/me"}
    assert file.default_path({**home, "HF_HOME": "/hf", "XDG_CACHE_HOME": "/c"}) == Path("/hf") / name
    assert file.default_path({**home, "HF_HOME": "~/hf"}) == Path("/home/me/hf") / name
    assert file.default_path({**home, "XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface") / name
    assert file.default_path({**home, "HF_HOME": ""}) == Path("/home/me/.cache/huggingface") / name
    assert file.default_path(home) == Path("/home/me/.cache/huggingface") / name


def test_an_old_json_file_counts_where_there_is_no_yaml_file(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path)}
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "default_config.json").write_text("{}")
    assert file.default_path(environ) == folder / "default_config.json"
    (folder / "default_config.yaml").write_text("")
    assert file.default_path(environ) == folder / "default_config.yaml"


# ---------------------------------------------------------------- values

TODAY = """\
    compute_environment: LOCAL_MACHINE
    debug: true
    distributed_type: MULTI_GPU
    downcast_bf16: 'no'
    dynamo_config:
      dynamo_backend: INDUCTOR
      dynamo_mode: default
      dynamo_use_dynamic: false
      dynamo_use_fullgraph: true
    enable_cpu_affinity: false
    gpu_ids: 0,2
    machine_rank: 1
    main_process_ip: 10.0.0.1
    main_process_port: 29501
    main_training_function: main
    mixed_precision: bf16
    num_machines: 2
    num_processes: 4
    rdzv_backend: static
    same_network: true
    tpu_env: []
    tpu_use_cluster: false
    tpu_use_sudo: false
    use_cpu: false
"""


def test_a_file_of_today(read: Read) -> None:
    seen = read(TODAY)
    assert seen.values == {
        "cpu": False,
        "multi_gpu": True,
        "debug": "collectives",
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": "default",
        "dynamo_use_dynamic": False,
        "dynamo_use_fullgraph": True,
        "enable_cpu_affinity": False,
        "gpu_ids": "0,2",
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29501,
        "main_training_function": "main",
        "mixed_precision": "bf16",
        "num_machines": 2,
        "num_processes": 4,
        "same_network": True,
    }
    assert (seen.ignored, seen.refused, seen.accelerator) == ({}, (), "cuda")
    assert (seen.lines["num_processes"], seen.lines["multi_gpu"], seen.lines["dynamo_mode"]) == (18, 3, 7)


def test_a_file_of_the_first_versions(read: Read) -> None:
    seen = read("""\
        compute_environment: LOCAL_MACHINE
        deepspeed_config: {}
        distributed_type: MULTI_GPU
        dynamo_backend: EAGER
        fp16: true
        fsdp_config: {}
        machine_rank: 0
        main_process_ip: null
        main_process_port: null
        main_training_function: main
        megatron_lm_config: {}
        num_machines: 1
        num_processes: -1
        tpu_name: null
        command_file: null
        commands: null
        downcast_bf16: no
        gpu_ids: all
    """)
    assert seen.values == {
        "multi_gpu": True,
        "dynamo_backend": "EAGER",
        "mixed_precision": "fp16",
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": 1,
    }
    assert (seen.ignored, seen.refused) == ({}, ())


def test_yaml_reads_no_as_false(read: Read) -> None:
    seen = read("distributed_type: NO\nmixed_precision: no\ndynamo_config: {dynamo_backend: no}\nfp16: no\n")
    assert seen.values == {"mixed_precision": "no", "dynamo_backend": "NO"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", "collectives"),
        ("'yes'", "collectives"),
        ("collectives", "collectives"),
        ("underflow_overflow", "underflow_overflow"),
        ("[collectives, underflow_overflow]", "collectives,underflow_overflow"),
        ("collectives, underflow_overflow", "collectives,underflow_overflow"),
        ("false", None),
        ("[]", None),
        ("null", None),
    ],
)
def test_debug_takes_what_the_argument_takes(read: Read, text: str, value: str | None) -> None:
    assert read(f"debug: {text}\n").values.get("debug") == value


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("distributed_type: MULTI_CPU", {"cpu": True}),
        ("distributed_type: MULTI_XPU", {"multi_gpu": True}),
        ("distributed_type: MPS", {}),
        ("fp16: false", {"mixed_precision": "no"}),
        ("rdzv_backend: c10d", {"rdzv_backend": "c10d"}),
        ("gpu_ids: 3", {"gpu_ids": "3"}),
        ("gpu_ids: [0, 1]", {"gpu_ids": "0,1"}),
        ("main_process_port: '29500'", {"main_process_port": 29500}),
        ("mpirun_config: {mpirun_hostfile: /hosts}", {"mpirun_hostfile": "/hosts"}),
        ("max_restarts: 3\nmonitor_interval: 0.5", {"max_restarts": 3, "monitor_interval": 0.5}),
        ("rdzv_conf: {timeout: 30, a: b}", {"rdzv_conf": "timeout=30,a=b"}),
        ("tee: 3\nquiet: true", {"tee": "3", "quiet": True}),
        ("gradient_accumulation_steps: 4", {"gradient_accumulation_steps": 4}),
        # a section's own number is the engine's
        ("deepspeed_config: {gradient_accumulation_steps: 4}", {}),
        ("base: &base\n  mixed_precision: bf16", None),
    ],
)
def test_one_key(read: Read, text: str, values: dict[str, object] | None) -> None:
    if values is None:
        with pytest.raises(ConfigError, match="'base' is not a known key"):
            read(text)
    else:
        assert read(text + "\n").values == values


def test_every_option_of_a_file_is_one_of_launch() -> None:
    # The function's name is kept for Accelerate; a script here is run as it is.
    assert file.OPTIONS - {option.name for option in fields(LaunchConfig)} == {"main_training_function"}


def test_a_json_file(read: Read) -> None:
    text = json.dumps(
        {"distributed_type": "NO", "num_processes": 1, "mixed_precision": "fp16", "use_cpu": True}, indent="\t"
    )
    seen = read(text, "config.json")  # type: ignore[call-arg]
    assert seen.values == {"cpu": True, "num_processes": 1, "mixed_precision": "fp16"}
    assert seen.lines["mixed_precision"] == 4


# ---------------------------------------------------------------- ignored and refused


def test_what_is_not_acted_on_is_named_with_the_reason(read: Read) -> None:
    seen = read("""\
        distributed_type: MULTI_GPU
        downcast_bf16: 'yes'
        tpu_name: mine
        fsdp_config: {fsdp_version: 2}
        fp8_config: {backend: TE}
        ipex_config: {ipex: true}
        mpirun_config: {mpirun_hostfile: hosts, mpirun_ccl: '1'}
        parallelism_config: {parallelism_config_tp_size: 1}
        region: us-east-1
        fp16: true
        mixed_precision: bf16
    """)
    assert seen.refused == ()
    assert seen.values["mixed_precision"] == "bf16"
    assert {key: why.split(",")[0] for key, why in seen.ignored.items()} == {
        "downcast_bf16": "it is for TPUs",
        "tpu_name": "it is for TPUs",
        "fsdp_config": "distributed_type is not FSDP",
        "fp8_config": "mixed_precision is not fp8",
        "ipex_config": "Intel's extension is no longer needed: torch has what it did",
        "mpirun_config.mpirun_ccl": "processes on CPUs talk through gloo",
        "parallelism_config": "all its sizes are 1",
        "region": "it is for Amazon SageMaker",
        "fp16": "mixed_precision is set",
    }


@pytest.mark.parametrize(
    ("text", "line", "asks"),
    [
        ("debug: false\ndistributed_type: FSDP\nfsdp_config: {fsdp_version: 2}", 2, "asks for FSDP"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}", 1, "asks for DeepSpeed"),
        ("distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2}", 1, "asks for Megatron-LM"),
        ("distributed_type: XLA", 1, "asks for TPUs"),
        ("distributed_type: TPU", 1, "asks for TPUs"),
        ("distributed_type: TP\ntp_config: {tp_size: 4}", 1, "asks for tensor parallelism"),
        ("distributed_type: MULTI_NPU", 1, "the package torch_npu only, and that is not installed"),
        ("mixed_precision: fp8\nfp8_config: {backend: TE}", 1, "mixed_precision: fp8 asks for fp8"),
        ("parallelism_config:\n  parallelism_config_dp_shard_size: 4", 2, "dp_shard_size: 4 asks for a model divided"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\nregion: x", 1, "Amazon SageMaker"),
    ],
)
def test_an_engine_that_is_not_built_is_refused(read: Read, text: str, line: int, asks: str) -> None:
    seen = read(text + "\n")
    (sentence,) = seen.refused
    assert sentence.startswith(f"{seen.path}, line {line}: ")
    assert asks in sentence
    assert sentence.endswith(".")
    assert "multi_gpu" not in seen.values
    assert seen.ignored == {}


# ---------------------------------------------------------------- mistakes


def test_all_mistakes_are_said_at_once_each_with_its_line(wrong: Callable[[str], str]) -> None:
    said = wrong("""\
        distributed_type: MULTI_GPUS
        num_proceses: 2
        mixed_precision: half
        use_cpu: maybe
        machine_rank: -1
        main_process_port: 70000
        gpu_ids: first
        debug: loud
        dynamo_config:
          dynamo_backend: fast
          backend: INDUCTOR
        mpirun_config: hosts
        xyzzy: 1
        compute_environment: MOON
    """)
    assert said.splitlines()[0] == "13 settings cannot be used:"
    for expected in (
        "FILE, line 2: 'num_proceses' is not a known key. Did you mean num_processes?",
        "FILE, line 3: mixed_precision: 'half' must be one of no, fp8, fp16, bf16.",
        "FILE, line 4: use_cpu: 'maybe' must be true or false.",
        "FILE, line 5: machine_rank: -1 must be a whole number of 0 or more.",
        "FILE, line 6: main_process_port: 70000 must be a whole number, 0 to 65535.",
        "FILE, line 7: gpu_ids: 'first' must be all, or numbers such as 0,2.",
        "FILE, line 8: debug: 'loud' must be true, false, one of collectives, underflow_overflow, or a list of these.",
        "FILE, line 10: dynamo_backend: 'fast' must be one of NO, EAGER,",
        "FILE, line 11: 'backend' is not a known key of dynamo_config. Did you mean dynamo_backend?",
        "FILE, line 12: mpirun_config: 'hosts' must be a section",
        "FILE, line 13: 'xyzzy' is not a known key. Remove it;",
        "FILE, line 14: compute_environment: 'MOON' must be LOCAL_MACHINE.",
        "FILE, line 1: distributed_type: 'MULTI_GPUS' must be one of NO, MULTI_CPU, MULTI_GPU,",
    ):
        assert expected in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "FILE is empty. `lockstep config --config_file FILE` fills it."),
        ("# only a comment\n", "FILE is empty."),
        ("- a\n- b\n", "FILE, line 1: a list stands here."),
        ("hello\n", "FILE, line 1: the text 'hello' stands here. Expected are lines of the form `key: value`."),
        ("debug: true\nuse_cpu: [1\nfp16: no\n", "FILE, line 3, column 5: this is not YAML: expected ',' or ']'"),
        ("debug: true\n  use_cpu: true\n", "There stands 'use_cpu: true'."),
        ("debug: *nobody\n", "FILE, line 1, column 8: this is not YAML: found undefined alias 'nobody'."),
        ("debug: 'a\n", "The file ends there."),
        ("debug: true\x07\n", "FILE is not YAML: unacceptable character #x0007"),
        ("a: 1\n---\nb: 2\n", "this is not YAML: but found another document."),
        ("debug: true\ndebug: false\n", "FILE, line 2: debug is set a second time, after line 1. Remove one of them."),
        (
            "dynamo_config:\n  dynamo_mode: default\n  dynamo_mode: default\n",
            "FILE, line 3: dynamo_mode is set a second time, after line 2.",
        ),
        ("[a, b]: 1\n", "FILE, line 1: a key must be a word"),
        ("debug: &a [*a]\n", "this value cannot be read: found unconstructable recursive node"),
        (
            "distributed_type: NO\nnum_processes: 4\n",
            "FILE, line 1: distributed_type: NO is one process, and line 2 says num_processes: 4.",
        ),
        (
            "use_cpu: true\ndistributed_type: MULTI_GPU\n",
            "FILE, line 2: distributed_type: MULTI_GPU contradicts use_cpu: true on line 1.",
        ),
        ("monitor_interval: .inf\ngrace: -1\n", "monitor_interval: inf must be a number above 0."),
        ("num_processes: true\n", "num_processes: True must be a whole number of 1 or more."),
        ("main_process_ip: 5\n", "main_process_ip: 5 must be text."),
    ],
)
def test_a_mistake(wrong: Callable[[str], str], text: str, said: str) -> None:
    assert said in wrong(text)


def test_a_file_that_is_missing_or_no_file(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist\. `lockstep config --config_file .*` writes it"):
        file.read(missing)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        file.read(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"role: caf\xe9\n")
    with pytest.raises(ConfigError, match="cannot be read: it is not UTF-8 text"):
        file.read(tmp_path / "latin.yaml")


def test_python_tags_run_nothing(wrong: Callable[[str], str], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    said = wrong(f"debug: true\nlog_dir: !!python/object/apply:pathlib.Path.touch ['{trace}']\n")
    assert "FILE, line 2: this value cannot be read: could not determine a constructor for the tag" in said
    assert not trace.exists()


# ---------------------------------------------------------------- writing


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    values = {
        "cpu": True,
        "num_processes": 4,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "mixed_precision": "bf16",
        "debug": "collectives,underflow_overflow",
        "dynamo_backend": "INDUCTOR",
        "mpirun_hostfile": "/hosts",
        "max_restarts": 2,
        "rdzv_conf": None,
    }
    path = file.write(tmp_path / "new" / "folder" / "config.yaml", values)
    seen = file.read(path)
    assert seen.values == {
        **{name: value for name, value in values.items() if value is not None},
        "enable_cpu_affinity": False,
        "main_training_function": "main",
        "same_network": True,
    }
    assert seen.keys["distributed_type"] == "MULTI_CPU"
    assert seen.keys["debug"] == ["collectives", "underflow_overflow"]
    assert (seen.ignored, seen.refused) == ({}, ())


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "NO"),
        ({"cpu": True, "num_processes": 1}, "NO"),
        ({"cpu": True, "num_processes": 2}, "MULTI_CPU"),
        ({"cpu": False, "multi_gpu": True, "num_processes": 2}, "MULTI_GPU"),
    ],
)
def test_the_type_follows_from_the_options(tmp_path: Path, values: dict[str, object], kind: str) -> None:
    assert file.read(file.write(tmp_path / "a.yaml", values)).keys["distributed_type"] == kind


def test_writing_replaces_all_or_nothing(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text("debug: true\n")
    link.symlink_to(real)
    file.write(link, {"mixed_precision": "fp16", "debug": False})
    assert link.is_symlink()
    assert file.read(real).values["mixed_precision"] == "fp16"
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "real.yaml"]
    real.chmod(0o600)
    file.write(link, {})
    assert stat.S_IMODE(real.stat().st_mode) == 0o600


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: one of its folders is a file"):
        file.write(tmp_path / "file" / "config.yaml", {})
    with pytest.raises(ConfigError, match="run_dir cannot be kept in a configuration file"):
        file.write(tmp_path / "config.yaml", {"run_dir": "x"})
    assert os.listdir(tmp_path) == ["file"]


def test_json_is_written_where_the_name_says_so(tmp_path: Path) -> None:
    path = file.write(tmp_path / "config.json", {"num_processes": 1})
    assert json.loads(path.read_text())["num_processes"] == 1
    assert file.read(path).values["num_processes"] == 1


# ---------------------------------------------------------------- the page


def test_the_page_names_every_key_and_type() -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = {*file_keys.TOP, *file_keys.IGNORED, *(key for section in file_keys.SECTIONS.values() for key in section)}
    assert sorted(key for key in keys if not re.search(rf"`{key}[`:]", page)) == []
    assert sorted(kind for kind in file_keys.ENGINES if kind != "TP" and kind not in page) == []


# ---------------------------------------------------------------- bringing up to date


def test_an_old_file_gets_the_keys_of_today(read: Read) -> None:
    keys, changes = file.today(
        read("""\
            distributed_type: TPU
            fp16: true
            dynamo_backend: INDUCTOR
            deepspeed_config: {}
            main_process_ip: null
            ipex_config: {ipex: true}
            mpirun_config: {mpirun_hostfile: hosts, mpirun_ccl: '1'}
            fsdp_config: {fsdp_version: 2}
            num_processes: 8
        """)
    )
    assert keys == {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "XLA",
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        "enable_cpu_affinity": False,
        "fsdp_config": {"fsdp_version": 2},
        "mixed_precision": "fp16",
        "mpirun_config": {"mpirun_hostfile": "hosts"},
        "num_processes": 8,
        "use_cpu": False,
    }
    assert "mixed_precision: 'fp16' is new, in place of fp16" in changes
    assert "distributed_type: 'TPU' is now 'XLA'" in changes
    assert "deepspeed_config: {} is gone: it says nothing" in changes
    assert "ipex_config: {'ipex': True} is gone: Accelerate no longer knows it" in changes


def test_a_file_of_today_needs_no_change(read: Read) -> None:
    seen = read(TODAY)
    assert file.today(seen) == (dict(seen.keys), [])


# ---------------------------------------------------------------- too much of it


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "a: " + "[" * 100_000, r"a.yaml, line 1: more than 32 levels are nested here"),
        ("a.json", '{"a": ' * 100_000, r"a.json, line 1: more than 32 levels are nested here"),
        ("a.json", "[" * 500_000 + "]" * 500_000, r"more than 32 levels"),
        ("a.yaml", "".join(" " * n + "k:\n" for n in range(1000)), r"a.yaml, line \d+: more than 32 levels"),
        ("a.yaml", "x: [" + "1, " * 100_000 + "]", r"line 1: the file holds more than 20000 values"),
        ("a.yaml", "x: 1\n" * 300_000, r"a.yaml cannot be read: it has more than 1024 KiB"),
        (
            "a.yaml",
            "debug: &a [[*a, *a], *a]\n",
            r"line 1: this value cannot be read: found unconstructable recursive node",
        ),
        (
            "a.yaml",
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
                for old, new in zip("abcdefgh", "bcdefghi", strict=False)
            ),
            r"line \d: the file holds more than 20000 values, those that are repeated by an alias counted each time",
        ),
        (
            "a.yaml",
            "a: &a {k: 1}\n"
            + "".join(f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 30)}]}}\n" for old, new in ("ab", "bc", "cd")),
            r"more than 20000 values",
        ),
    ],
)
def test_a_file_that_would_take_for_ever_is_refused_first(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    start = time.process_time()
    with pytest.raises(ConfigError, match=words):
        file.read(path)
    assert time.process_time() - start < 20


def test_a_device_is_no_configuration_file() -> None:
    with pytest.raises(ConfigError, match=r"/dev/zero cannot be read: it has more than 1024 KiB"):
        file.read("/dev/zero")


def test_names_for_parts_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "num_processes: &n 2\ndynamo_config: &d {dynamo_backend: INDUCTOR}\nnum_machines: 1\nmachine_rank: 0\n"
    )
    assert file.read(path).values["num_processes"] == 2
    path.write_text("num_processes: &n 2\nmain_process_port: *n\n")
    assert file.read(path).values["main_process_port"] == 2
