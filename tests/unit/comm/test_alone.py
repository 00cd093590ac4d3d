"""Collectives of a process that is alone in its world give back what they got."""

from __future__ import annotations

import pytest
import torch

from lockstep.comm import objects, tensors
from lockstep.errors import ConfigError
from lockstep.process_group.group import Group
from lockstep.topology.topology import Topology


@pytest.fixture
def group() -> Group:
    return Group.connect(Topology(device=torch.device("cpu")))


def test_the_input_comes_back(group: Group) -> None:
    tree = {"a": torch.ones(2), "b": [torch.tensor(1)]}
    assert tensors.gather(group, tree) is tree
    assert tensors.reduce(group, tree, "sum") is tree
    assert tensors.reduce(group, tree, "mean") is tree
    assert tensors.broadcast(group, tree) is tree
    assert tensors.pad_across_processes(group, tree) is tree
    listed = ["x"]
    assert objects.gather_object(group, listed) is listed
    assert objects.broadcast_object_list(group, listed) is listed
    assert objects.all_objects(group, 5) == [5]
    group.barrier()


def test_scale_counts_alone_too(group: Group) -> None:
    assert tensors.reduce(group, [torch.tensor(2.0)], "mean", scale=0.5) == [torch.tensor(1.0)]


def test_wrong_arguments_are_refused_alone_too(group: Group) -> None:
    with pytest.raises(ConfigError, match=r"reduction='min' is not known.*'sum', 'mean', 'max', 'none'"):
        tensors.reduce(group, torch.ones(1), "min")
    for wrong in (1, -1):
        with pytest.raises(ConfigError, match=f"from_process={wrong} is not a rank of this job. Allowed: 0 to 0"):
            tensors.broadcast(group, torch.ones(1), wrong)
        with pytest.raises(ConfigError, match=f"from_process={wrong} is not a rank"):
            objects.broadcast_object_list(group, [1], wrong)
