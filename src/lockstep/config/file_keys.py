"""The keys of configuration files: which are acted on, how each value is read, and why the others are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.config import env
from lockstep.config.choices import DebugTool, DynamoBackend, ExplainedEnum, PrecisionType
from lockstep.errors import ConfigError

Parse = Callable[[Any], Any]
"""Value in the file -> value of the option; None when it says nothing. A ValueError says what is allowed."""

# ---------------------------------------------------------------- values


def parse_flag(value: Any) -> bool:
    """A yes or no, as YAML has it or as text."""
    if isinstance(value, (bool, str)):
        with contextlib.suppress(ConfigError):
            return env.parse_flag(str(value), "")
    raise ValueError("true or false")


def parse_fp16(value: Any) -> str:
    """The precision that ``fp16: true`` or ``false`` stood for, before there was a choice of them."""
    return str(PrecisionType.FP16 if parse_flag(value) else PrecisionType.NO)


def _whole(lowest: int, highest: int | None = None, unset: int | None = None) -> Parse:
    allowed = f"a whole number of {lowest} or more" if highest is None else f"a whole number, {lowest} to {highest}"

    def parse(value: Any) -> int | None:
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = int(value)
        if value == unset and unset is not None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ValueError(allowed)
        if highest is not None and value > highest:
            raise ValueError(allowed)
        return value

    return parse


def _number(value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, bool) and 0 <= float(value) < float("inf"):
            return float(value)
    raise ValueError("a number of 0 or more")


def _above_zero(value: Any) -> float:
    with contextlib.suppress(ValueError):
        if (number := _number(value)) > 0:
            return number
    raise ValueError("a number above 0")


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value or None
    raise ValueError("text")


def _rendezvous(value: Any) -> str | None:
    text = _text(value)
    return None if text == "static" else text


def _pairs(value: Any) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items()) or None
    try:
        return _text(value)
    except ValueError:
        raise ValueError("text of the form key=value,key=value") from None


def _gpu_ids(value: Any) -> str | None:
    items = value if isinstance(value, list) else str(value).split(",")
    ids = [str(item).strip() for item in items]
    if ids == ["all"]:
        return None
    if not isinstance(value, bool) and ids and all(item.isdecimal() for item in ids):
        return ",".join(ids)
    raise ValueError("all, or numbers such as 0,2")


def _one_of(choices: type[ExplainedEnum]) -> Parse:
    def parse(value: Any) -> str:
        # `no` without quotes is False in YAML.
        value = "no" if value is False else value
        try:
            return str(choices.parse(value, ""))
        except ConfigError:
            raise ValueError(f"one of {', '.join(choices.list())}") from None

    return parse


def _listed(*allowed: str) -> Parse:
    def parse(value: Any) -> str:
        if isinstance(value, bool) or str(value) not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return parse


def parse_debug(value: Any) -> str | None:
    """The tools of debug mode as the variable has them: names, with commas; None for none."""
    with contextlib.suppress(ValueError):
        return str(DebugTool.COLLECTIVES) if parse_flag(value) else None
    names = value if isinstance(value, list) else str(value).split(",")
    try:
        tools = [str(DebugTool.parse(name.strip() if isinstance(name, str) else name, "")) for name in names]
    except ConfigError:
        raise ValueError(f"true, false, one of {', '.join(DebugTool.list())}, or a list of these") from None
    return ",".join(tools) or None


# ---------------------------------------------------------------- keys

ACTED: Mapping[str, tuple[str, Parse]] = {
    "use_cpu": ("cpu", parse_flag),
    # -1 is what Accelerate writes when the number is to be given later.
    "num_processes": ("num_processes", _whole(1, unset=-1)),
    "num_machines": ("num_machines", _whole(1)),
    "machine_rank": ("machine_rank", _whole(0)),
    "main_process_ip": ("main_process_ip", _text),
    "main_process_port": ("main_process_port", _whole(0, 65535)),
    "rdzv_backend": ("rdzv_backend", _rendezvous),
    "mixed_precision": ("mixed_precision", _one_of(PrecisionType)),
    "gpu_ids": ("gpu_ids", _gpu_ids),
    "debug": ("debug", parse_debug),
    "enable_cpu_affinity": ("enable_cpu_affinity", parse_flag),
    "same_network": ("same_network", parse_flag),
    "main_training_function": ("main_training_function", _text),
}
"""Key of Accelerate's files -> option of ``lockstep launch``, and how the value is read."""

SECTIONS: Mapping[str, Mapping[str, tuple[str, Parse]]] = {
    "dynamo_config": {
        "dynamo_backend": ("dynamo_backend", _one_of(DynamoBackend)),
        "dynamo_mode": ("dynamo_mode", _listed("default", "reduce-overhead", "max-autotune")),
        "dynamo_use_fullgraph": ("dynamo_use_fullgraph", parse_flag),
        "dynamo_use_dynamic": ("dynamo_use_dynamic", parse_flag),
        "dynamo_use_regional_compilation": ("dynamo_use_regional_compilation", parse_flag),
    },
    "mpirun_config": {"mpirun_hostfile": ("mpirun_hostfile", _text)},
}
"""The same for keys that stand in a section of their own."""

OWN: Mapping[str, tuple[str, Parse]] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", _whole(1)),
    "num_cpu_threads_per_process": ("num_cpu_threads_per_process", _whole(1)),
    "max_restarts": ("max_restarts", _whole(0)),
    "monitor_interval": ("monitor_interval", _above_zero),
    "grace": ("grace", _number),
    "rdzv_endpoint": ("rdzv_endpoint", _text),
    "rdzv_conf": ("rdzv_conf", _pairs),
    "rdzv_id": ("rdzv_id", _text),
    "role": ("role", _text),
    "tee": ("tee", _listed("0", "1", "2", "3")),
    "log_dir": ("log_dir", _text),
    "quiet": ("quiet", parse_flag),
    "project_dir": ("project_dir", _text),
}
"""Keys that Accelerate does not know, and refuses a file for."""

_TPU = "it is for TPUs, which are not supported yet"
SAGEMAKER = "it is for Amazon SageMaker, and compute_environment is not AMAZON_SAGEMAKER"

IGNORED: Mapping[str, str] = {
    "deepspeed_config": "distributed_type is not DEEPSPEED",
    "fsdp_config": "distributed_type is not FSDP",
    "megatron_lm_config": "distributed_type is not MEGATRON_LM",
    "fp8_config": "mixed_precision is not fp8",
    "parallelism_config": "all its sizes are 1, so there is nothing to divide",
    "tp_config": "its tp_size is 1, so there is nothing to divide",
    "ipex_config": "Intel's extension is no longer needed: torch has what it did",
    "mpirun_ccl": "processes on CPUs talk through gloo, which has no such setting",
    "fp16": "mixed_precision is set, and replaced it",
    "dynamo_backend": "dynamo_config is set, and replaced it",
    **dict.fromkeys(
        (
            "downcast_bf16",
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_env",
            "command_file",
            "commands",
        ),
        _TPU,
    ),
    **dict.fromkeys(
        (
            "ec2_instance_type",
            "iam_role_name",
            "image_uri",
            "profile",
            "region",
            "base_job_name",
            "pytorch_version",
            "transformers_version",
            "py_version",
            "sagemaker_inputs_file",
            "sagemaker_metrics_file",
            "additional_args",
        ),
        SAGEMAKER,
    ),
}
"""Keys that nothing is done about, and why. Values that switch nothing on (no, false, empty) are not worth a word."""

ENGINES = {
    "FSDP": ("FSDP", "fsdp_config"),
    "DEEPSPEED": ("DeepSpeed", "deepspeed_config"),
    "MEGATRON_LM": ("Megatron-LM", "megatron_lm_config"),
    "XLA": ("TPUs and other XLA devices", None),
    "TPU": ("TPUs", None),
    "TP": ("tensor parallelism", "tp_config"),
}
"""distributed_type -> the engine it asks for, and the section that belongs to it."""

DEVICES = {
    "MULTI_GPU": ("cuda", None),
    "MULTI_XPU": ("xpu", None),
    "MULTI_NPU": ("npu", "torch_npu"),
    "MULTI_MLU": ("mlu", "torch_mlu"),
    "MULTI_SDAA": ("sdaa", "torch_sdaa"),
    "MULTI_MUSA": ("musa", "torch_musa"),
    "MULTI_HPU": ("hpu", "habana_frameworks"),
    "MULTI_NEURON": ("neuron", "torch_neuronx"),
}
"""distributed_type -> torch's name of the device, and the add-on without which torch does not know it."""

TYPES = ("NO", "MULTI_CPU", *DEVICES, "MPS", *ENGINES)
"""Every distributed_type that some version of Accelerate writes."""

TOP = frozenset({"compute_environment", "distributed_type", *ACTED, *SECTIONS, *OWN, *IGNORED}) - {"mpirun_ccl"}
"""Every key that can stand at the left margin."""
