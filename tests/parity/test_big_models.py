"""Models of transformers of which parts wait on disk: the same results, and no more memory than Accelerate takes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from lockstep.utils import infer_auto_device_map
from lockstep.utils.modeling import find_tied_parameters, get_state_dict_offloaded_model

transformers = pytest.importorskip("transformers")  # an extra of the benchmarks

SMALL: dict[str, Any] = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1}
MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_positions=32, n_embd=48, n_layer=4, n_head=4, **SMALL)
    ),
    "Llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **SMALL,
        )
    ),
}
WORDS = torch.randint(2, 100, (2, 8), generator=torch.Generator().manual_seed(0))


def results(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones_like(WORDS)
    with torch.no_grad():
        logits = model(WORDS, attention_mask=mask).logits
        words = model.generate(WORDS, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=1)
    return logits, words


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["disk", "mix", "limits", "offloaded"])
def test_logits_and_generated_words_are_the_same(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    source = MODELS[name]().eval()
    wanted = results(source)
    source.save_pretrained(tmp_path / "model", max_shard_size="30KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    with init_empty_weights():
        model = MODELS[name]().eval()
    model.tie_weights()
    whole = model._no_split_modules
    blocks = "transformer.h" if name == "GPT-2" else "model.layers"
    device_map: Any = {
        "disk": {"": "disk"},
        "mix": {"": "cpu", blocks: "disk", f"{blocks}.2": "cpu"},
        "limits": infer_auto_device_map(model, {"cpu": 150_000}, no_split_module_classes=list(whole)),
    }.get(kind)
    with caplog.at_level(logging.WARNING):
        if device_map is None:
            model = disk_offload(source, tmp_path / "off")
        else:
            assert "disk" in device_map.values()
            load_checkpoint_and_dispatch(model, tmp_path / "model", device_map, offload_folder=tmp_path / "off")
    assert not [text for text in caplog.messages if "weights of the model are not in it" in text]
    for _ in range(2):
        found = results(model)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
    assert any(parameter.is_meta for parameter in model.parameters())
    assert find_tied_parameters(model) == ([["lm_head.weight", "transformer.wte.weight"]] if name == "GPT-2" else [])
    assert set(get_state_dict_offloaded_model(model)) == set(MODELS[name]().state_dict())


def test_no_more_memory_than_accelerate(tmp_path: Path, note: Any) -> None:
    script = Path(__file__).with_name("offload_memory.py")
    seen = {}
    for library in ("accelerate", "lockstep"):
        command = [sys.executable, str(script), library, str(tmp_path / library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        seen[library] = json.loads(done.stdout.splitlines()[-1])
    theirs, ours = seen["accelerate"], seen["lockstep"]
    assert ours["sum"] == theirs["sum"]
    note(f"peak of a disk-offloaded GPT-2: {ours['peak'] / 1e6:.0f} MB, Accelerate {theirs['peak'] / 1e6:.0f} MB")
    assert ours["peak"] <= 1.1 * theirs["peak"]
