"""Which packages are installed, without importing them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib import metadata, util
from typing import Any

from lockstep.config import env
from lockstep.errors import ConfigError

_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": lambda one, other: not one == other,  # noqa: SIM201 - torch's class has its own == only
    "<=": operator.le,
    "<": operator.lt,
}


def is_installed(module: str, *distributions: str) -> bool:
    """Whether a module can be imported and is more than a folder that happens to have its name.

    Trackers leave folders of their own names ("wandb", "aim") where they run; Python takes any folder for a package.
    ``distributions`` are the names under which the package may be installed, where they differ from the module's.
    """
    try:
        spec = util.find_spec(module)
    except (ImportError, ValueError):  # a parent package is missing; a stand-in in sys.modules has no spec
        return False
    if spec is None:
        return False
    return spec.origin is not None or any(_has(name) for name in (distributions or (module,)))


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Whether a version is ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"`` another.

    A text is the name of an installed package, whose version is taken; anything else is a version.
    """
    compare = _OPERATIONS.get(operation)
    if compare is None:
        raise ConfigError(f"operation={operation!r} is not known. Allowed: {', '.join(map(repr, _OPERATIONS))}.")
    from torch.torch_version import TorchVersion  # torch's reader of versions; the only one that is always there

    by_name = isinstance(library_or_version, str) and not isinstance(library_or_version, TorchVersion)
    version = metadata.version(library_or_version) if by_name else str(library_or_version)
    return bool(compare(TorchVersion(version), requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version is ``operation`` another: ``is_torch_version(">=", "2.9")``."""
    return compare_versions("torch", operation, version)


def _at_least(module: str, version: str) -> bool:
    return is_installed(module) and compare_versions(module, ">=", version)


def is_4bit_bnb_available() -> bool:
    """Whether bitsandbytes is installed, with 4 bits."""
    return _at_least("bitsandbytes", "0.39.0")


def is_8bit_bnb_available() -> bool:
    """Whether bitsandbytes is installed, with 8 bits."""
    return _at_least("bitsandbytes", "0.37.2")


def is_aim_available() -> bool:
    """Whether aim is installed."""
    return is_installed("aim")


def is_amdsmi_available() -> bool:
    """Whether amdsmi is installed."""
    return is_installed("amdsmi")


def is_boto3_available() -> bool:
    """Whether boto3 is installed."""
    return is_installed("boto3")


def is_clearml_available() -> bool:
    """Whether clearml is installed."""
    return is_installed("clearml")


def is_comet_ml_available() -> bool:
    """Whether comet_ml is installed."""
    return is_installed("comet_ml")


def is_datasets_available() -> bool:
    """Whether datasets is installed."""
    return is_installed("datasets")


def is_deepspeed_available() -> bool:
    """Whether deepspeed is installed."""
    return is_installed("deepspeed")


def is_dvclive_available() -> bool:
    """Whether dvclive is installed."""
    return is_installed("dvclive")


def is_import_timer_available() -> bool:
    """Whether import_timer is installed."""
    return is_installed("import_timer")


def is_lomo_available() -> bool:
    """Whether lomo_optim is installed."""
    return is_installed("lomo_optim")


def is_matplotlib_available() -> bool:
    """Whether matplotlib is installed."""
    return is_installed("matplotlib")


def is_mlflow_available() -> bool:
    """Whether MLflow is installed, whole or skinny."""
    return is_installed("mlflow", "mlflow", "mlflow-skinny")


def is_msamp_available() -> bool:
    """Whether MS-AMP is installed."""
    return is_installed("msamp", "ms-amp")


def is_pandas_available() -> bool:
    """Whether pandas is installed."""
    return is_installed("pandas")


def is_peft_available() -> bool:
    """Whether peft is installed."""
    return is_installed("peft")


def is_pynvml_available() -> bool:
    """Whether pynvml is installed."""
    return is_installed("pynvml", "pynvml", "nvidia-ml-py")


def is_pytest_available() -> bool:
    """Whether pytest is installed."""
    return is_installed("pytest")


def is_sagemaker_available() -> bool:
    """Whether sagemaker is installed."""
    return is_installed("sagemaker")


def is_schedulefree_available() -> bool:
    """Whether schedulefree is installed."""
    return is_installed("schedulefree")


def is_swanlab_available() -> bool:
    """Whether swanlab is installed."""
    return is_installed("swanlab")


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def is_timm_available() -> bool:
    """Whether timm is installed."""
    return is_installed("timm")


def is_torchao_available() -> bool:
    """Whether torchao is installed, 0.6.1 or newer."""
    return _at_least("torchao", "0.6.1")


def is_torchdata_available() -> bool:
    """Whether torchdata is installed."""
    return is_installed("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata is installed, with its StatefulDataLoader."""
    return _at_least("torchdata", "0.8.0")


def is_torchvision_available() -> bool:
    """Whether torchvision is installed."""
    return is_installed("torchvision")


def is_trackio_available() -> bool:
    """Whether trackio is installed."""
    return is_installed("trackio")


def is_transformer_engine_available() -> bool:
    """Whether Transformer Engine is installed."""
    return is_installed("transformer_engine", "transformer-engine")


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return is_installed("transformers")


def is_triton_available() -> bool:
    """Whether triton is installed."""
    return is_installed("triton")


def is_wandb_available() -> bool:
    """Whether wandb is installed."""
    return is_installed("wandb")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, in this version or a newer one."""
    return is_installed("bitsandbytes") if min_version is None else _at_least("bitsandbytes", min_version)


def is_fp8_available() -> bool:
    """Whether a package that computes in fp8 is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_megatron_lm_available() -> bool:
    """Whether Megatron-LM is asked for by ACCELERATE_USE_MEGATRON_LM, and installed. Lockstep cannot train with it."""
    asked = env.parse_flag(env.snapshot().get("ACCELERATE_USE_MEGATRON_LM", "0"), "ACCELERATE_USE_MEGATRON_LM")
    return asked and is_installed("megatron", "megatron-core")


def is_rich_available() -> bool:
    """Whether ACCELERATE_ENABLE_RICH asks for rich's tracebacks; rich itself is always installed."""
    asked = env.parse_flag(env.snapshot().get("ACCELERATE_ENABLE_RICH", "0"), "ACCELERATE_ENABLE_RICH")
    return asked and is_installed("rich")
