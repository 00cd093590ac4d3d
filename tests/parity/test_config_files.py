"""Configuration files: what the real Accelerate writes is read here, what is written here is read by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import file
from lockstep.launch.basic_config import Detected, write_basic

WRITE = """
import json, sys
from pathlib import Path
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.utils import write_basic_config

folder = Path(sys.argv[1])
write_basic_config(save_location=str(folder / "basic.yaml"))
write_basic_config("bf16", save_location=str(folder / "basic-bf16.json"))
for name, options in json.load(sys.stdin).items():
    kind = SageMakerConfig if options["compute_environment"] == "AMAZON_SAGEMAKER" else ClusterConfig
    kind(**options).to_yaml_file(folder / f"{name}.yaml")
    kind(**options).to_json_file(folder / f"{name}.json")
"""

READ = """
import json, sys
from accelerate.commands.config.config_args import default_config_file, load_config_from_file

seen = {path: load_config_from_file(path).to_dict() for path in sys.argv[1:]}
print(json.dumps({"default": default_config_file, "seen": seen}))
"""

REFUSE = """
import sys
from accelerate.commands.config.config_args import load_config_from_file

try:
    load_config_from_file(sys.argv[1])
except ValueError as error:
    print(error)
"""

CLUSTER: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "use_cpu": False,
    "debug": False,
}

THEIRS: dict[str, dict[str, Any]] = {
    "no": {"num_processes": 1, "use_cpu": True},
    "multi-cpu": {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2, "debug": True},
    "mpirun": {
        "distributed_type": "MULTI_CPU",
        "use_cpu": True,
        "num_processes": 4,
        "num_machines": 2,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "mpirun_config": {"mpirun_hostfile": "/hosts"},
    },
    "multi-gpu": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "mixed_precision": "fp16",
        "gpu_ids": "0,1",
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_fullgraph": True},
        "downcast_bf16": "no",
    },
    "two-machines": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 8,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "rdzv_backend": "c10d",
        "same_network": True,
    },
    "fsdp": {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}},
    "deepspeed": {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 2}},
    "xla": {"distributed_type": "XLA", "num_processes": 8, "tpu_use_sudo": True, "tpu_env": ["A=b"]},
    "fp8": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "mixed_precision": "fp8",
        "fp8_config": {"backend": "TE", "fp8_format": "HYBRID"},
    },
    "parallel": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 4,
        "parallelism_config": {"parallelism_config_tp_size": 4},
    },
    "sagemaker": {
        "compute_environment": "AMAZON_SAGEMAKER",
        "ec2_instance_type": "ml.p3.2xlarge",
        "iam_role_name": "role",
    },
}
"""Name -> what Accelerate is told beside CLUSTER."""

EVERYWHERE = {
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "same_network": False,
    "cpu": False,
}

VALUES: dict[str, dict[str, Any]] = {
    "no": {"cpu": True, "num_processes": 1},
    "multi-cpu": {"cpu": True, "num_processes": 2, "debug": "collectives"},
    "mpirun": {
        "cpu": True,
        "num_processes": 4,
        "num_machines": 2,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "mpirun_hostfile": "/hosts",
    },
    "multi-gpu": {
        "multi_gpu": True,
        "num_processes": 2,
        "mixed_precision": "fp16",
        "gpu_ids": "0,1",
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": "default",
        "dynamo_use_fullgraph": True,
    },
    "two-machines": {
        "multi_gpu": True,
        "num_processes": 8,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "rdzv_backend": "c10d",
        "same_network": True,
    },
}
"""Name -> the options that are read from that file, beside EVERYWHERE."""

REFUSED = {
    "fsdp": "distributed_type: FSDP asks for FSDP",
    "deepspeed": "distributed_type: DEEPSPEED asks for DeepSpeed",
    "xla": "distributed_type: XLA asks for TPUs and other XLA devices",
    "fp8": "mixed_precision: fp8 asks for fp8",
    "parallel": "parallelism_config_tp_size: 4 asks for a model divided over processes",
    "sagemaker": "compute_environment: AMAZON_SAGEMAKER asks for jobs on Amazon SageMaker",
}

OURS: dict[str, dict[str, Any]] = {
    "alone": {"num_processes": 1},
    "cpu": {"cpu": True, "num_processes": 2, "debug": True},
    "gpu": {"multi_gpu": True, "num_processes": 2, "gpu_ids": "0,1", "mixed_precision": "bf16"},
    "machines": {
        "multi_gpu": True,
        "num_processes": 8,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "rdzv_backend": "c10d",
    },
    "mpirun": {"cpu": True, "num_processes": 2, "mpirun_hostfile": "/hosts"},
    "compiled": {
        "num_processes": 1,
        "dynamo_backend": "INDUCTOR",
        "dynamo_use_dynamic": True,
        "enable_cpu_affinity": True,
    },
}
"""Name -> options that are written here, in keys that Accelerate knows."""


def accelerate(program: str, *arguments: str, text: str = "", **variables: str) -> str:
    """What a short program says that uses the real Accelerate, in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "LOCKSTEP_"))}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**kept, **variables},
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that Accelerate wrote."""
    folder = tmp_path_factory.mktemp("theirs")
    accelerate(WRITE, str(folder), text=json.dumps({name: {**CLUSTER, **more} for name, more in THEIRS.items()}))
    return folder


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize("name", VALUES)
def test_a_file_of_accelerate_is_acted_on(theirs: Path, name: str, suffix: str) -> None:
    seen = file.read(theirs / f"{name}.{suffix}")
    assert seen.values == {**EVERYWHERE, **VALUES[name]}
    assert (seen.ignored, seen.refused) == ({}, ())
    # and it is a file of today
    assert [change for change in file.today(seen)[1] if "is new" not in change] == []


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_file_for_an_engine_that_is_not_built_is_refused(theirs: Path, name: str, suffix: str) -> None:
    (sentence,) = file.read(theirs / f"{name}.{suffix}").refused
    assert REFUSED[name] in sentence


def test_every_file_was_looked_at(theirs: Path) -> None:
    assert VALUES.keys() | REFUSED.keys() == THEIRS.keys()
    assert {path.stem for path in theirs.iterdir()} == {*THEIRS, "basic", "basic-bf16"}


def test_the_basic_file_is_the_same(theirs: Path, tmp_path: Path) -> None:
    """On a machine without accelerators, which is what tests have."""
    here = write_basic(tmp_path / "basic.yaml", Detected(kind="cpu", count=0), "no")
    known, ours = file.read(theirs / "basic.yaml").values, file.read(here).values
    # Ours to choose: it asks whether machines share a network, and there is one machine.
    assert {**known, "same_network": True} == ours
    assert file.read(theirs / "basic-bf16.json").values["mixed_precision"] == "bf16"


def test_files_written_here_are_read_by_accelerate(tmp_path: Path) -> None:
    written = {}
    for name, options in OURS.items():
        for suffix in ("yaml", "json"):
            path = file.write(tmp_path / f"{name}.{suffix}", options)
            written[str(path)] = file.read(path)
    answer = json.loads(accelerate(READ, *written, HF_HOME=str(tmp_path)))
    assert answer["default"] == str(file.default_path({"HF_HOME": str(tmp_path)}))
    for path, ours in written.items():
        known = answer["seen"][path]
        # All that was written arrived, and nothing was made of it that is not there; the rest are its defaults.
        assert {key: known[key] for key in ours.keys} == dict(ours.keys)
        assert {key for key in known.keys() - ours.keys.keys() if known[key] not in (False, -1)} == set()


def test_an_updated_file_is_read_by_accelerate(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(
        "compute_environment: LOCAL_MACHINE\ndeepspeed_config: {}\ndistributed_type: MULTI_GPU\nfp16: true\n"
        "dynamo_backend: EAGER\nipex_config: {ipex: false}\nmpirun_config: {mpirun_ccl: '1', mpirun_hostfile: /hosts}\n"
        "machine_rank: 0\nmain_process_ip: null\nmain_training_function: main\nnum_machines: 1\nnum_processes: 2\n"
    )
    before = file.read(old)
    file.dump(old, file.today(before)[0])
    assert file.read(old).values == {**before.values, "enable_cpu_affinity": False, "cpu": False}
    known = json.loads(accelerate(READ, str(old), HF_HOME=str(tmp_path)))["seen"][str(old)]
    assert (known["mixed_precision"], known["num_processes"]) == ("fp16", 2)
    assert known["dynamo_config"] == {"dynamo_backend": "EAGER"}
    assert known["mpirun_config"] == {"mpirun_hostfile": "/hosts"}


def test_a_key_of_our_own_is_refused_by_accelerate(tmp_path: Path) -> None:
    """Why such keys are written only where they are set."""
    path = file.write(tmp_path / "own.yaml", {"max_restarts": 2})
    assert "unknown keys (['max_restarts'])" in accelerate(REFUSE, str(path), HF_HOME=str(tmp_path))
