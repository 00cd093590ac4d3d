"""What the accelerator and its states say, the defaults of the options, and seeds."""

from __future__ import annotations

from tests.parity.compare import differences
from tests.parity.run import Runs


def test_attributes_are_the_same(runs: Runs) -> None:
    assert differences(runs, "facts/attributes", without=("device",)) == []
    for rank, (theirs, ours) in enumerate(runs.pairs("facts/attributes")):
        # The processor has one memory: Accelerate numbers it by process.
        assert [name.split(":")[0] for name in theirs["device"]] == ours["device"]
        seen = ours["accelerator"]
        assert (seen["num_processes"], seen["process_index"]) == (runs.world_size, rank)


def test_precision_is_the_same(runs: Runs) -> None:
    assert differences(runs, "facts/precision") == []


def test_gradient_state_is_the_same(runs: Runs) -> None:
    assert differences(runs, "facts/gradient state", without=("more",)) == []
    for theirs, ours in runs.pairs("facts/gradient state"):
        # Ours to choose: the plugin's default is True in both; Accelerate's state then says False.
        assert theirs["more"] == [False, *ours["more"][1:]]
        assert ours["more"][0] is True


def test_seeds_draw_the_same_numbers(runs: Runs) -> None:
    assert differences(runs, "facts/seeds") == []
    draws = [ours["by device"] for _, ours in runs.pairs("facts/seeds")]
    assert draws[0] == runs.lockstep[0]["facts/seeds"]["42"]
    assert all(draws[0] != other for other in draws[1:])


def test_options_have_the_same_fields_and_defaults(runs: Runs) -> None:
    own = {
        # chosen by the device, and left to torch
        "InitProcessGroupKwargs": {"backend": None, "timeout": None},
        # the arithmetic of an incomplete window is ours
        "GradientAccumulationPlugin": {"tail_divisor": {"enum": "present"}},
        # read from the environment by Accelerate when the object is made, by us when it is used
        "TorchDynamoPlugin": {"mode": None, "fullgraph": None, "use_regional_compilation": None},
    }
    for theirs, ours in runs.pairs("facts/options"):
        assert ours == {name: {**fields, **own.get(name, {})} for name, fields in theirs.items()}


def test_choices_have_the_same_members(runs: Runs) -> None:
    for theirs, ours in runs.pairs("facts/choices"):
        # The guides call XLA "TPU".
        assert ours["DistributedType"].pop("TPU")["repr"] == "<DistributedType.XLA: 'XLA'>"
        for name, members in theirs.items():
            assert list(ours[name]) == list(members)
            for member, seen in members.items():
                assert [ours[name][member][key] for key in ("value", "repr")] == [seen["value"], seen["repr"]]
                # Ours are all equal to their text; in Accelerate, some kinds are.
                assert ours[name][member]["equal"]
                if name != "DistributedType":
                    assert ours[name][member]["str"] == seen["str"]
