"""What the guides that users know show, our pages show too: every import they use, every heading they have.

The guides are Accelerate's quick tour and troubleshooting guide and transformers' debugging guide. The lists here are
explicit on purpose.
"""

from __future__ import annotations

import importlib
import re

import pytest

from tests.docs.runner import ROOT, read_page

# ---------------------------------------------------------------- imports

NOW = [
    ("Accelerator", "lockstep"),
    ("DistributedType", "lockstep"),
    ("notebook_launcher", "lockstep"),
    ("DebugUnderflowOverflow", "lockstep.debug_utils"),
    ("detect_overflow", "lockstep.debug_utils"),
    ("find_executable_batch_size", "lockstep"),
    ("find_executable_batch_size", "lockstep.utils"),
    ("get_logger", "lockstep.logging"),
    ("load_checkpoint_in_model", "lockstep"),
    ("ProjectConfiguration", "lockstep.utils"),
    ("DistributedOperationException", "lockstep.utils.operations"),
    ("broadcast", "lockstep.utils.operations"),
    ("gather", "lockstep.utils.operations"),
    ("reduce", "lockstep.utils.operations"),
]
"""Name, module: what the guides import (or name by its module) that this release has."""

LATER = []
"""The same, for chapters to come. Whoever adds one moves its line up, and shows it on the page that lacks it."""

METHODS_NOW = [
    "autocast",
    "accumulate",
    "backward",
    "check_breakpoint",
    "check_trigger",
    "clip_grad_norm_",
    "clip_grad_value_",
    "device",
    "distributed_type",
    "free_memory",
    "gather",
    "gather_for_metrics",
    "is_local_main_process",
    "is_main_process",
    "load_state",
    "optimizer_step_was_skipped",
    "pad_across_processes",
    "prepare",
    "print",
    "reduce",
    "register_for_checkpointing",
    "save_model",
    "save_state",
    "set_breakpoint",
    "set_trigger",
    "unwrap_model",
    "wait_for_everyone",
]
"""What the guides call on an accelerator that this release has."""

PAGES = ["quicktour", "troubleshooting", "debugging", "help"]


@pytest.mark.parametrize(("name", "module"), NOW)
def test_a_name_of_the_guides_imports(name: str, module: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from {module} import {name}", namespace)
    assert namespace[name] is not None


@pytest.mark.parametrize("name", METHODS_NOW)
def test_a_method_of_the_guides_is_there(name: str) -> None:
    assert hasattr(importlib.import_module("lockstep").Accelerator, name)


def test_the_blocks_of_our_pages_use_what_the_guides_use() -> None:
    """The blocks themselves are run by test_code_blocks.py; hidden ones do not count here."""
    shown = "\n".join(visible_python(page) for page in PAGES)
    imported = {name for line in re.findall(r"^from \S+ import (.+)$", shown, re.M) for name in re.split(r",\s*", line)}
    expected = {"Accelerator", "DistributedType", "find_executable_batch_size", "get_logger", "broadcast"}
    assert expected <= imported
    called = set(re.findall(r"accelerator\.(\w+)", shown))
    prose_only = {"check_breakpoint", "clip_grad_value_", "free_memory", "reduce", "set_breakpoint"}
    prose_only |= {"register_for_checkpointing"}  # shown in checkpoints.md
    assert sorted(set(METHODS_NOW) - called - prose_only) == []
    text = "\n".join(page_text(page) for page in PAGES)
    assert [name for name in sorted(prose_only) if name not in text] == []


# ---------------------------------------------------------------- headings

SECTIONS = {
    # Accelerate's quick tour
    "Quick tour": "quicktour#quick-tour",
    "Getting started with Accelerate": "quicktour#getting-started",
    "Enable distributed training in your script": "quicktour#make-your-script-distributed",
    "Add distributed evaluation": "quicktour#evaluate-on-all-processes",
    "Launch your distributed script": "quicktour#start-your-script",
    "Common modifications of the base case": "quicktour#common-changes-to-the-plain-case",
    "Launch distributed training from a notebook": "quicktour#train-from-a-notebook",
    "Specifics of training on TPU": "quicktour#tpu",
    "Execute a statement only on one process": "quicktour#run-something-on-one-process-only",
    "Defer execution on multiple GPUs": "quicktour#wait-for-the-others",
    "Save/load a model in a distributed setup": "quicktour#save-and-load-a-model",
    "Save/load entire states": "quicktour#save-and-load-the-whole-state",
    "Use gradient clipping": "quicktour#gradient-clipping",
    "Train with mixed precision": "quicktour#mixed-precision",
    "Use gradient accumulation": "quicktour#gradient-accumulation",
    # Accelerate's troubleshooting guide, in its three versions
    "Troubleshoot": "troubleshooting#troubleshooting",
    "Logging": "troubleshooting#logging",
    "Hanging code and timeout errors": "troubleshooting#code-that-hangs-and-timeouts",
    "Mismatched tensor shapes": "troubleshooting#shapes-that-do-not-match",
    "Early stopping": "troubleshooting#early-stopping",
    "Low kernel versions on Linux": "troubleshooting#old-linux-kernels",
    "MPI": "troubleshooting#mpi",
    "Out-of-Memory": "troubleshooting#out-of-memory",
    "CUDA out of memory": "troubleshooting#out-of-memory",
    "find_executable_batch_size": "troubleshooting#out-of-memory",
    "Non-reproducible results between device setups": "troubleshooting#results-that-differ-between-setups",
    "Performance issues on different GPUs": "troubleshooting#gpus-of-different-kinds",
    "Ask for help": "troubleshooting#ask-for-help",
    "Forums": "help#questions",
    "Discord": "help#chat",
    "GitHub issues": "help#bugs",
    # transformers' debugging guide
    "Debugging": "debugging#debugging",
    "Multi-GPU network issues debug": "debugging#network-problems-between-processes",
    "Underflow and overflow detection": "debugging#underflow-and-overflow",
    "Specific batch absolute min and max value tracing": "debugging#smallest-and-largest-values-of-chosen-batches",
}
"""A guide's heading -> where we have that section."""


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_heading_of_the_guides_has_its_section(heading: str) -> None:
    page, _, anchor = SECTIONS[heading].partition("#")
    assert anchor in anchors(page)


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists() or (anchor and anchor not in anchors_of(file.read_text(encoding="utf-8"))):
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert broken == []


def page_text(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def visible_python(page: str) -> str:
    """The Python that a reader of the page sees, skipped blocks included."""
    text = re.sub(r"<!--.*?-->", "", page_text(page), flags=re.DOTALL)
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.DOTALL))


def anchors(page: str) -> set[str]:
    return anchors_of(page_text(page))


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_our_pages_run_their_blocks() -> None:
    """A page whose blocks are all skipped would hold nothing."""
    assert [page for page in PAGES[:3] if len(read_page(ROOT / "docs" / f"{page}.md").python) < 5] == []
