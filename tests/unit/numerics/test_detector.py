"""The detector: what it prints, when it stops, and that it fits any model."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep import ConfigError, NumericsError
from lockstep.debug_utils import DebugUnderflowOverflow, run_in_fp32
from lockstep.traces.frames import Frame

Out = pytest.CaptureFixture[str]


class Frames(list[Frame]):
    """Keeps frames."""

    closed = False

    def add(self, frame: Frame) -> None:
        self.append(frame)

    def close(self) -> None:
        self.closed = True


class Overflow(nn.Module):
    """Gives an infinity once it is told to."""

    def __init__(self, value: float = math.inf) -> None:
        super().__init__()
        self.value, self.on = value, False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value if self.on else x * 1.0


def chain(*parts: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict((f"part{place}", part) for place, part in enumerate(parts)))


def simple() -> nn.Sequential:
    return chain(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def seen(model: nn.Module, *args: Any, **kwargs: Any) -> Frames:
    frames = Frames()
    with DebugUnderflowOverflow(model, record=frames, gradients=False):
        model(*args, **kwargs)
    return frames


# ---------------------------------------------------------------- the report


def test_the_report_has_the_form_of_the_guide(capsys: Out) -> None:
    model = chain(nn.Linear(2, 2, bias=False), Overflow())
    with torch.no_grad():
        model.part0.weight.copy_(torch.tensor([[1.0, 2.0], [-3.0, 4.0]]))
    model.part1.on = True
    detector = DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match=r"inf/nan detected during batch_number=0.*output of part1") as caught:
        model(torch.tensor([[1.0, -0.5]]))
    detector.remove()
    assert isinstance(caught.value, NumericsError)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:13] == [
        "",
        "Detected inf/nan during batch_number=0",
        "Last 2 forward frames:",
        "abs min  abs max  metadata",
        "                  part0 Linear",
        "1.00e+00 4.00e+00 weight",
        "5.00e-01 1.00e+00 input[0]",
        "0.00e+00 5.00e+00 output",
        "                  part1 Overflow",
        "0.00e+00 5.00e+00 input[0]",
        "     inf      inf output",
        "",
        "First bad number: inf in output of part1 (Overflow).",
    ]


def test_as_many_frames_as_asked_for(capsys: Out) -> None:
    model = chain(*(nn.ReLU() for _ in range(30)), Overflow())
    model.part30.on = True
    for frames in (21, 5, 100):
        with DebugUnderflowOverflow(model, max_frames_to_save=frames), pytest.raises(ValueError, match="inf/nan"):
            model(torch.ones(1))
        out = capsys.readouterr().out
        assert f"Last {min(frames, 31)} forward frames:" in out
        assert out.count("input[0]\n") == min(frames, 31)
    with pytest.raises(ConfigError, match="max_frames_to_save=0"):
        DebugUnderflowOverflow(model, max_frames_to_save=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trace_batch_nums": [-1]}, r"trace_batch_nums=\[-1\].*0 or more"),
        ({"trace_batch_nums": 3}, r"trace_batch_nums=3 must be a list"),
        ({"trace_batch_nums": "13"}, r"trace_batch_nums=\['1', '3'\]"),
        ({"trace_batch_nums": [1.0]}, r"trace_batch_nums=\[1.0\]"),
        ({"trace_batch_nums": [True]}, r"trace_batch_nums=\[True\]"),
        ({"abort_after_batch_num": "x"}, r"abort_after_batch_num='x'"),
        ({"abort_after_batch_num": -1}, r"abort_after_batch_num=-1"),
        ({"max_frames_to_save": "x"}, r"max_frames_to_save='x'"),
        ({"max_frames_to_save": 2.5}, r"max_frames_to_save=2.5"),
        ({"record_batches": [0, -2]}, r"record_batches=\[0, -2\].* has -2\."),
        ({"trace_batch_nums": [-1], "abort_after_batch_num": "x"}, r"2 settings.*abort_after.*trace_batch_nums"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_once(options: dict[str, Any], said: str) -> None:
    model = simple()
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        DebugUnderflowOverflow(model, **options)
    assert not any(part._forward_hooks for part in model.modules())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear, "the class Linear, not an object of it"),
        ({"model": None}, "a dict"),
        (None, "a NoneType"),
        (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1), "an? SGD"),
    ],
)
def test_what_is_not_a_module_is_refused_at_once(model: Any, said: str) -> None:
    for use in (DebugUnderflowOverflow, lambda model: run_in_fp32(model, "part0")):
        with pytest.raises(ConfigError, match=f"model is {said}.* Pass a torch.nn.Module"):
            use(model)


def test_batches_may_be_numbers_of_numpy(capsys: Out) -> None:
    model = simple()
    with DebugUnderflowOverflow(model, trace_batch_nums=np.arange(1, 2), abort_after_batch_num=np.int64(1)):
        model(torch.ones(1, 4))
        with pytest.raises(ValueError, match="abort_after_batch_num=1"):
            model(torch.ones(1, 4))
    assert re.findall(r"Starting batch number=(\d+)", capsys.readouterr().out) == ["1"]


def test_the_batch_is_right_even_in_the_frame_of_the_model_itself(capsys: Out) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor, bad: bool) -> Tensor:
            return self.inner(x) + (math.nan if bad else 0.0)

    model = Outer()
    with DebugUnderflowOverflow(model):
        model(torch.ones(1, 2), False)
        with pytest.raises(ValueError, match="batch_number=1"):
            model(torch.ones(1, 2), True)
    out = capsys.readouterr().out
    assert "Detected inf/nan during batch_number=1" in out
    assert "                   Outer\n" in out  # no name
    assert "     not a tensor input[1]" in out
    assert out.count("*** Starting batch number=1 ***") == 1


@pytest.mark.parametrize("place", ["weight", "input"])
def test_bad_weights_and_inputs_are_found(place: str, capsys: Out) -> None:
    model = simple()
    x = torch.ones(1, 4)
    with torch.no_grad():
        (model.part0.weight if place == "weight" else x)[0, 0] = math.nan
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match=f"nan in {place}.* of part0"):
        model(x)
    out = capsys.readouterr().out
    assert ("an update, a checkpoint or its initialisation" in out) == (place == "weight")
    assert ("Look at the batch itself" in out) == (place == "input")


def test_large_weights_are_looked_at_and_told_from_the_report_on(capsys: Out) -> None:
    model = chain(nn.Linear(100, 100, bias=False), Overflow())
    model.part1.on = True
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match="inf/nan"):
        model(torch.ones(1, 100))
    weight = model.part0.weight.detach().abs()
    assert f"{weight.min():8.2e} {weight.max():8.2e} weight" in capsys.readouterr().out
    model.part1.on = False
    model.part0.weight.data[3, 3] = math.inf  # torch does not count this as a change
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match="inf in weight of part0"):
        model(torch.ones(1, 100))


def test_an_additive_mask_is_no_bad_number() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with DebugUnderflowOverflow(model):
        model(torch.randn(2, 5, 8), mask=mask).sum().backward()


# ---------------------------------------------------------------- tracing


def test_chosen_batches_are_printed_and_nothing_is_detected(capsys: Out) -> None:
    model = chain(nn.Linear(2, 2), Overflow())
    detector = DebugUnderflowOverflow(model, trace_batch_nums=[1, 3], abort_after_batch_num=3)
    for batch in range(3):
        model.part1.on = batch == 2
        model(torch.ones(1, 2))
    with pytest.raises(
        ValueError, match=r"^DebugUnderflowOverflow: aborting after 4 batches due to `abort_after_batch_num=3` arg$"
    ):
        model(torch.ones(1, 2))
    detector.remove()
    out = capsys.readouterr().out
    assert re.findall(r"\*\*\* Starting batch number=(\d+) \*\*\*", out) == ["1", "3"]
    assert out.startswith("\n\n                  *** Starting batch number=1 ***\nabs min  abs max  metadata\n")
    assert out.count("part0 Linear") == out.count("                   Sequential") == 2
    assert "     inf      inf output" in out


def test_abort_alone_still_detects() -> None:
    model = chain(Overflow())
    model.part0.on = True
    with DebugUnderflowOverflow(model, abort_after_batch_num=5), pytest.raises(ValueError, match="inf/nan"):
        model(torch.ones(1))


# ---------------------------------------------------------------- counting


def test_evaluation_in_between_and_failures_do_not_count() -> None:
    model = simple()
    with DebugUnderflowOverflow(model) as detector:
        for expected in range(3):
            assert detector.batch_number == expected
            model(torch.ones(1, 4))
        with torch.no_grad():
            model.eval()
            model(torch.ones(1, 4))
            model.train()
        model.eval()(torch.ones(1, 4))  # without no_grad, as some write it
        model.train()
        assert detector.batch_number == 3
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 5))
        assert detector.batch_number == 3
        try:
            raise KeyError
        except KeyError:
            model(torch.ones(1, 4))  # a batch tried again where an error is handled
        assert detector.batch_number == 4


def test_a_forward_that_was_interrupted_does_not_confuse_the_count() -> None:
    class Interrupted(nn.Module):
        on = True

        def forward(self, x: Tensor) -> Tensor:
            if self.on:
                raise KeyboardInterrupt
            return x

    model = chain(nn.Linear(2, 2), Interrupted())
    with DebugUnderflowOverflow(model) as detector:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2))
        model.part1.on = False
        for expected in (0, 1):
            assert detector.batch_number == expected
            model(torch.ones(1, 2))
        assert detector.batch_number == 2


def test_evaluation_before_training_is_not_training() -> None:
    model = simple()
    with DebugUnderflowOverflow(model) as detector:
        model.eval()
        for _ in range(3):
            model(torch.ones(1, 4))
        assert detector.batch_number == 3  # a script that never trains counts them
        model.train()
        model(torch.ones(1, 4))
        assert detector.batch_number == 1


def test_a_bad_number_in_evaluation_is_told_as_such(capsys: Out) -> None:
    model = chain(nn.Linear(2, 2), Overflow())
    with DebugUnderflowOverflow(model):
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
        model.eval()
        model.part1.on = True
        with pytest.raises(ValueError, match="inf/nan"), torch.no_grad():
            model(torch.ones(1, 2))
    assert "batch_number=1\nin an evaluation pass after that batch\n" in capsys.readouterr().out


def test_a_model_that_calls_itself_is_one_batch() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self(self.part(x), False) if again else x

    model = Twice()
    with DebugUnderflowOverflow(model) as detector:
        model(torch.ones(1, 2))
        assert detector.batch_number == 1


# ---------------------------------------------------------------- any model


@dataclass
class Answer:
    logits: Tensor
    note: str = "text"
    more: Any = None


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As that of transformers: a mapping whose items are attributes, too."""


class Gives(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(args[0])


GIVEN: dict[str, tuple[Any, list[str]]] = {
    "tensor": (lambda x: x, ["output"]),
    "tuple": (lambda x: (x, None, (x, "text")), ["output[0]", "output[1]", "output[2][0]", "output[2][1]"]),
    "list": (lambda x: [x, 3], ["output[0]", "output[1]"]),
    "dict": (lambda x: {"a": x, "mode": "text", "b": [x]}, ["output['a']", "output['b'][0]"]),
    "dataclass": (lambda x: Answer(x), ["output.logits"]),
    "dataclass in a tuple": (lambda x: (Answer(x), x), ["output[0].logits", "output[1]"]),
    "ModelOutput": (lambda x: ModelOutput(logits=x, loss=None), ["output['logits']"]),
    "none": (lambda x: None, ["output"]),
    "text": (lambda x: "text", ["output"]),
    "empty": (lambda x: (), ["output"]),
    "packed": (
        lambda x: nn.utils.rnn.pack_sequence([x.flatten()]),
        [f"output[{place}]" for place in range(4)],
    ),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_structures_are_looked_into(kind: str) -> None:
    make, names = GIVEN[kind]
    frame = seen(Gives(make), torch.ones(1, 2))[-1]
    assert [stat.name for stat in frame.stats] == ["input[0]", *names]
    notes = {stat.name: stat.note for stat in frame.stats if stat.note}
    assert notes == {
        "tuple": {"output[1]": "None", "output[2][1]": "not a tensor"},
        "list": {"output[1]": "not a tensor"},
        "none": {"output": "None"},
        "text": {"output": "not a tensor"},
        "empty": {"output": "not a tensor"},
        "packed": {"output[2]": "None", "output[3]": "None"},
    }.get(kind, {})


def test_an_overflow_inside_a_structure_is_found() -> None:
    for make in (lambda x: Answer(x / 0), lambda x: {"a": [x, (x / 0,)]}, lambda x: ModelOutput(logits=x / 0)):
        with DebugUnderflowOverflow(model := Gives(make)), pytest.raises(ValueError, match="inf in output"):
            model(torch.ones(1))


def test_what_is_given_by_name_is_looked_at() -> None:
    frame = seen(Gives(lambda x: x), torch.ones(1), mask=torch.zeros(2), scale=2.0, extra={"a": torch.ones(1)})[-1]
    assert [stat.name for stat in frame.stats] == [
        "input[0]", "input['mask']", "input['scale']", "input['extra']['a']", "output",
    ]  # fmt: skip


def test_a_structure_that_holds_itself_has_an_end() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    assert seen(Gives(lambda x: loop), torch.ones(1))[-1].stats[1].name == "output[0]"


def test_shared_modules_and_modules_called_several_times() -> None:
    shared = nn.Linear(2, 2)
    frames = seen(nn.Sequential(shared, nn.ReLU(), shared), torch.ones(1, 2))
    assert [(frame.module, frame.call) for frame in frames] == [("0", 0), ("1", 0), ("0", 1), ("", 0)]


def test_a_module_that_changes_its_input() -> None:
    model = chain(nn.Linear(2, 2), nn.ReLU(inplace=True), Overflow())
    frames = seen(model, torch.tensor([[-1.0, -1.0]]))
    assert frames[1].stats[0].abs_min == frames[1].stats[1].abs_min
    model.part2.on = True
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match="inf in output of part2"):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, capsys: Out) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(2, 2), chain(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=reentrant)

    model = Checkpointed()
    frames = Frames()
    with DebugUnderflowOverflow(model, record=frames) as detector:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        assert detector.batch_number == 2
        forward = [frame.module for frame in frames if frame.phase == "forward" and frame.batch == 1]
        assert forward == ["first", "block.part0", "block.part1", "block.part2", "block", ""]
        assert {frame.module for frame in frames if frame.phase == "backward"} >= {"first", "block.part0"}
        model.block.part1.register_full_backward_hook(lambda *_: (torch.full((1, 2), math.nan),))
        with pytest.raises(ValueError, match="nan in"):
            model(torch.ones(1, 2)).sum().backward()
    assert "backward frames:" in capsys.readouterr().out


def test_a_compiled_model_runs_uncompiled_meanwhile() -> None:
    model = chain(nn.Linear(2, 2), Overflow())
    model.compile(backend="eager", fullgraph=True)
    model(torch.ones(1, 2))
    model.part1.on = True
    model(torch.ones(1, 2))
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match="inf in output of part1"):
        model(torch.ones(1, 2))
    assert math.isinf(model(torch.ones(1, 2))[0, 0].item())  # compiled, and without a detector
    outer = torch.compile(chain(nn.Linear(2, 2), Overflow()), backend="eager")
    outer(torch.ones(1, 2))
    outer._orig_mod.part1.on = True
    with DebugUnderflowOverflow(outer), pytest.raises(ValueError, match="inf in output of part1"):
        outer(torch.ones(1, 2))


def test_copies_and_pickles_of_the_model_have_no_detector() -> None:
    model = chain(nn.Linear(2, 2), Overflow())
    with DebugUnderflowOverflow(model) as detector:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other.part1.on = True
            other(torch.ones(1, 2)).sum().backward()
        assert detector.batch_number == 0
        assert b"lockstep" not in pickle.dumps(nn.Sequential(*model.children())[:1])


def test_removing_leaves_no_hooks() -> None:
    model = simple()
    frames = Frames()
    detector = DebugUnderflowOverflow(model, record=frames)
    detector.remove()
    detector.remove()
    assert frames.closed
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    with torch.no_grad():
        model.part0.weight.fill_(math.nan)
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert len(frames) == 0


def test_odd_tensors_crash_nothing() -> None:
    model = Gives(lambda x: (x, torch.ones(2, dtype=torch.int32), torch.empty(0), torch.empty(2, device="meta")))
    with DebugUnderflowOverflow(model):
        for given in (torch.eye(2).to_sparse(), torch.ones(1, dtype=torch.bool), torch.tensor(1j), torch.tensor(3)):
            model(given)


def test_inference_mode() -> None:
    model = chain(nn.Linear(2, 2), Overflow())
    with DebugUnderflowOverflow(model) as detector, torch.inference_mode():
        model(torch.ones(1, 2))
        model.part1.on = True
        with pytest.raises(ValueError, match="inf in output"):
            model(torch.ones(1, 2))
        assert detector.batch_number == 1


# ---------------------------------------------------------------- backward and updates


class Root(nn.Module):
    """The slope of a root is infinite at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * 0.0)


def test_a_gradient_of_zeros_and_negative_infinities_is_no_mask() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2))
    model[2].register_full_backward_hook(lambda *_: (torch.tensor([[0.0, -math.inf]]),))
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match=r"inf in grad_output\[0\] of 0"):
        model(torch.ones(1, 2)).sum().backward()


def test_the_first_bad_gradient_is_found(capsys: Out) -> None:
    model = chain(nn.Linear(2, 2), Root(), nn.Linear(2, 1))
    with DebugUnderflowOverflow(model):
        loss = model(torch.ones(1, 2)).sum()
        with pytest.raises(ValueError, match=r"nan in grad_output\[0\] of part0|nan in .*grad.* of part0"):
            loss.backward()
    out = capsys.readouterr().out
    assert "Last 3 backward frames:" in out
    assert out.index("part2 Linear") < out.index("part1 Root") < out.index("part0 Linear")
    assert "It arose between there and part1 (Root)" in out
    with DebugUnderflowOverflow(model, gradients=False):
        model(torch.ones(1, 2)).sum().backward()


def test_a_bad_gradient_of_a_parameter_alone_is_found() -> None:
    model = simple()
    model.part2.weight.register_hook(lambda gradient: gradient / 0)
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match=r"in weight.grad of part2"):
        model(torch.ones(1, 4)).sum().backward()


def test_the_update_that_breaks_a_parameter_is_found(capsys: Out) -> None:
    model = simple()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38, momentum=0.9)
    with DebugUnderflowOverflow(model):
        (100 * model(torch.ones(1, 4)).sum()).backward()
        with pytest.raises(ValueError, match=r"(inf|nan) in weight of part"):
            optimizer.step()
    out = capsys.readouterr().out
    assert "after a step of SGD" in out
    assert "weight momentum_buffer" in out
    assert "Lower the learning rate" in out
    other = nn.Linear(1, 1)
    with DebugUnderflowOverflow(model, gradients=True):
        torch.optim.SGD(other.parameters(), lr=1.0).step()  # somebody else's


def test_overflows_of_the_loss_scaler_are_normal_until_20_in_a_row(capsys: Out) -> None:
    model = simple()

    def step(scale: float) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(1, 4)).float().sum()
        (loss * scale).backward()
        model.zero_grad()

    with DebugUnderflowOverflow(model):
        for _ in range(19):
            step(1e30)
        step(1.0)
        for _ in range(19):
            step(1e30)
        with pytest.raises(ValueError, match="grad"):
            step(1e30)
    assert "backward frames:" in capsys.readouterr().out


def test_gradients_and_updates_are_recorded() -> None:
    model = simple()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frames = Frames()
    with DebugUnderflowOverflow(model, record=frames):
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    backward = [(frame.module, stat.name) for frame in frames for stat in frame.stats if frame.phase == "backward"]
    assert ("part2", "grad_output[0]") in backward
    assert ("part0", "weight.grad") in backward
    assert {frame.batch for frame in frames} == {0, 1}


# ---------------------------------------------------------------- underflow and remedies


def test_underflow_is_told_with_its_share(capsys: Out) -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.tensor([1.0, 1e-6, 1e-6, 0.0])).half()

    model = chain(Small())
    with DebugUnderflowOverflow(model) as detector:
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    (found,) = [one for one in detector.underflows.values() if one.module == "part0"]
    assert (found.share, found.dtype, found.batch) == (0.75, "float16", 0)
    told = capsys.readouterr().err
    assert "75% of output of part0 (Small) became zero or subnormal (below 6.10e-05 in fp16), batch_number=0" in told
    assert told.count("part0 (Small)") == 1


def test_zeros_alone_are_no_underflow(capsys: Out) -> None:
    model = chain(nn.ReLU()).half()
    with DebugUnderflowOverflow(model) as detector:
        model(torch.full((4,), -1.0, dtype=torch.float16))
    assert detector.underflows == {}


class Layer(nn.Module):
    """As in the guide: what a dropout scales up was close to the edge already."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.dropout = nn.Linear(2, 2, bias=False), nn.Dropout(0.5)
        nn.init.constant_(self.dense.weight, 250.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.dense(x))


def test_the_remedy_is_the_narrowest_module(capsys: Out) -> None:
    torch.manual_seed(0)
    model = chain(nn.Identity(), Layer())
    with (
        DebugUnderflowOverflow(model),
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ValueError, match=r"inf in output of part1\.dropout"),
    ):
        model(torch.full((8, 2), 125.0))
    out = capsys.readouterr().out
    assert "On the edge: abs max 6.25e+04 of fp16's 6.55e+04 in output of part1.dense (Linear)." in out
    assert 'run_in_fp32(model, "part1")' in out
