"""Which devices and number formats this machine offers, under the names that scripts ask for them."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from lockstep.config.env import patched
from lockstep.host.packages import is_installed, is_torch_version


def is_cuda_available() -> bool:
    """Whether a GPU of NVIDIA's or AMD's can be used; asked without starting CUDA, so that processes can still fork."""
    with patched({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Whether it is AMD's."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether an Apple GPU can be used, and torch is of this version or newer."""
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available() and torch.backends.mps.is_built()


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether an Intel GPU can be used."""
    return _answers("xpu", check_device)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether an Intel Gaudi can be used."""
    return _plugin("habana_frameworks.torch", "hpu")


def is_mlu_available(check_device: bool = False) -> bool:
    """Whether an MLU of Cambricon's can be used."""
    return _plugin("torch_mlu", "mlu", check_device)


def is_musa_available(check_device: bool = False) -> bool:
    """Whether a GPU of Moore Threads' can be used."""
    return _plugin("torch_musa", "musa", check_device)


def is_neuron_available(check_device: bool = False) -> bool:
    """Whether an AWS Neuron device can be used."""
    return _plugin("torch_neuronx", "neuron", check_device)


def is_npu_available(check_device: bool = False) -> bool:
    """Whether an Ascend NPU can be used."""
    return _plugin("torch_npu", "npu", check_device)


def is_sdaa_available(check_device: bool = False) -> bool:
    """Whether an SDAA device of Tecorigin's can be used."""
    return _plugin("torch_sdaa", "sdaa", check_device)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """False: Lockstep does not train by XLA yet, whatever is installed."""
    return False


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the device computes in bf16."""
    if is_cuda_available():
        return torch.cuda.is_bf16_supported()
    if is_mps_available():
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def is_fp16_available() -> bool:
    """Whether the device computes in fp16."""
    return True


def is_weights_only_available() -> bool:
    """Whether ``torch.load`` can refuse to run code: always, in the versions of torch that are supported."""
    return True


def is_pippy_available() -> bool:
    """False: Lockstep has no ``prepare_pippy``."""
    return False


def is_xccl_available() -> bool:
    """Whether torch has the collectives of Intel GPUs."""
    return bool(torch.distributed.is_xccl_available())


def _plugin(module: str, name: str, check_device: bool = False) -> bool:
    """A device whose backend is a package of its own."""
    if not is_installed(module):
        return False
    try:
        importlib.import_module(module)
    except Exception:  # installed for another torch, or without its driver
        return False
    return _answers(name, check_device)


def _answers(name: str, check_device: bool) -> bool:
    backend: Any = getattr(torch, name, None)
    if backend is None:
        return False
    try:
        if check_device:
            backend.device_count()
        return bool(backend.is_available())
    except RuntimeError:
        return False
