"""The closed sets of values users choose from, named and valued as Accelerate names them."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from lockstep.errors import ConfigError

_Choice = TypeVar("_Choice", bound="ExplainedEnum")


class ExplainedEnum(str, Enum):
    """An enum that equals its text and explains itself when a text is none of its members."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """All values, in order of definition."""
        return [str(member.value) for member in cls]

    @classmethod
    def parse(cls: type[_Choice], value: Any, name: str) -> _Choice:
        """The member for a member or its text; ``name`` is the setting that the error talks about."""
        if isinstance(value, cls):
            return value
        for member in cls:
            if isinstance(value, str) and value.lower() == str(member.value).lower():
                return member
        allowed = ", ".join(repr(text) for text in cls.list())
        raise ConfigError(f"{name}={value!r} is not known. Allowed: {allowed}.")


class DistributedType(ExplainedEnum):
    """How the processes of the job work together."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    TPU = "XLA"
    """The older name of XLA, used by the guides; the same member."""


class PrecisionType(ExplainedEnum):
    """Numeric precision of the forward pass."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(ExplainedEnum):
    """Random number generators that can be put in step between ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class DynamoBackend(ExplainedEnum):
    """What torch.compile compiles with."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class DDPCommunicationHookType(ExplainedEnum):
    """How DDP compresses gradients on their way between ranks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class LoggerType(ExplainedEnum):
    """The experiment trackers that come with Lockstep."""

    ALL = "all"
    """Every one whose package is installed."""
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    JSONL = "jsonl"
    """A text file with one record in each line; needs no package, and is not part of "all"."""


class SchedulerUnit(ExplainedEnum):
    """What one ``scheduler.step()`` of the training loop advances the schedule by."""

    PROCESS = "process"
    """Accelerate's rule: one step per process and update, unless batches are split."""
    UPDATE = "update"
    """One step per optimizer update, on any number of processes."""


class TailDivisor(ExplainedEnum):
    """What the last, incomplete accumulation window of an epoch is averaged over."""

    PRESENT = "present"
    """The micro-batches that the window has."""
    WINDOW = "window"
    """The full window, as Accelerate does."""


class NanPolicy(ExplainedEnum):
    """What is done about a loss or gradient that is NaN or infinite."""

    STOP = "stop"
    """All ranks stop at that update."""
    SKIP = "skip"
    """All ranks drop that update."""
    WARN = "warn"
    """It is told, once."""
    OFF = "off"
    """Nobody looks."""


class DebugTool(ExplainedEnum):
    """The checks that debug mode can switch on."""

    COLLECTIVES = "collectives"
    UNDERFLOW_OVERFLOW = "underflow_overflow"
