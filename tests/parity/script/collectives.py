"""Collectives, nested structures, and work divided between processes."""

from collections import OrderedDict, namedtuple

import torch
from accelerate import PartialState
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    gather,
    gather_object,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
    slice_tensors,
)
from notes import attempt, fresh
from torch.utils.data import DataLoader

Pair = namedtuple("Pair", "left right")


def scenarios():
    return {
        "comm/gather": gathers,
        "comm/reduce": reduces,
        "comm/broadcast": broadcasts,
        "comm/pad": pads,
        "comm/objects": objects,
        "comm/trees": trees,
        "comm/trigger": trigger,
        "comm/split": splits,
        "comm/decorators": decorators,
        "metrics/map": metrics,
    }


def tensors():
    rank = PartialState().process_index
    return {
        "vector": torch.arange(3.0) + 10 * rank,
        "matrix": torch.arange(4).reshape(2, 2) + 10 * rank,
        "single": torch.tensor(float(rank)),
        "flags": torch.tensor([rank == 0, True]),
        "half": torch.tensor([0.5 + rank, 2.0], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 2),
        "bytes": torch.tensor([rank, 7], dtype=torch.uint8),
    }


def structures():
    found = tensors()
    return {
        "list": [found["vector"], found["single"]],
        "tuple": (found["vector"], [found["matrix"]]),
        "named tuple": Pair(found["vector"], {"inner": found["matrix"]}),
        "dict": {"a": found["vector"], "b": (found["half"],)},
        "ordered dict": OrderedDict(z=found["vector"], a=found["matrix"]),
    }


def each(function, *names):
    items = {**tensors(), **structures()}
    return {name: attempt(lambda item=items[name]: function(item)) for name in names or items}


def gathers():
    accelerator = fresh()
    return {
        "method": each(accelerator.gather),
        "function": each(gather),
        "of text": attempt(lambda: accelerator.gather("text")),
        "of a number": attempt(lambda: accelerator.gather(3)),
        "of mixed": attempt(lambda: accelerator.gather([torch.ones(1), "text"])),
    }


SUMMABLE = ("vector", "matrix", "single", "half", "empty", "list", "tuple", "named tuple", "dict", "ordered dict")


def reduces():
    accelerator = fresh()
    mean = ("vector", "single", "empty", "list", "half")
    return {
        "method default": each(accelerator.reduce, *SUMMABLE),
        "method mean": each(lambda item: accelerator.reduce(item, "mean"), *mean),
        "method sum scaled": each(lambda item: accelerator.reduce(item, "sum", 0.5), *mean),
        "method mean scaled": each(lambda item: accelerator.reduce(item, reduction="mean", scale=3.0), *mean),
        "function default": each(reduce, *mean),
        "function sum": each(lambda item: reduce(item, reduction="sum"), *SUMMABLE),
        "method max": each(lambda item: accelerator.reduce(item, "max"), *SUMMABLE),
        "function max": each(lambda item: reduce(item, "max"), *SUMMABLE),
        "method none": each(lambda item: accelerator.reduce(item, "none"), *mean),
        "mean of whole numbers": each(lambda item: accelerator.reduce(item, "mean"), "matrix"),
        "none scaled": each(lambda item: accelerator.reduce(item, "none", 2.0), *mean),
    }


def broadcasts():
    fresh()
    last = PartialState().num_processes - 1
    return {
        "from 0": each(broadcast),
        "from last": each(lambda item: broadcast(item, from_process=last)),
        "objects": broadcast_object_list([PartialState().process_index, {"a": "b"}]),
        "objects from last": broadcast_object_list([PartialState().process_index, None], from_process=last),
    }


def pads():
    accelerator = fresh()
    rank = accelerator.process_index
    row, grid = torch.arange(2.0 + rank) + 1, torch.ones(2, 1 + rank, dtype=torch.long)
    return {
        "default": accelerator.pad_across_processes(row),
        "first": accelerator.pad_across_processes(row, pad_first=True),
        "index": accelerator.pad_across_processes(row, pad_index=-100),
        "dim 1": accelerator.pad_across_processes(grid, dim=1),
        "dim 1 first": accelerator.pad_across_processes(grid, dim=1, pad_index=9, pad_first=True),
        "last dim": accelerator.pad_across_processes(grid, dim=-1, pad_index=4),
        "first of two, counted from the end": accelerator.pad_across_processes(grid.T, dim=-2),
        "dim that is not there": accelerator.pad_across_processes(row, dim=1),
        "equal": accelerator.pad_across_processes(torch.ones(2)),
        "scalar": attempt(lambda: accelerator.pad_across_processes(torch.tensor(1.0))),
        "structure": accelerator.pad_across_processes({"a": row, "b": [grid]}, dim=0),
        "function": pad_across_processes(row, dim=0, pad_index=3, pad_first=True),
        "of text": attempt(lambda: accelerator.pad_across_processes("text")),
    }


def objects():
    rank = PartialState().process_index
    return {
        "lists": gather_object([rank, f"rank {rank}"]),
        "uneven lists": gather_object(["x"] * rank),
        "dicts in lists": gather_object([{"rank": rank}]),
        "long": len(gather_object(["y" * 10000])),
        "tuple": gather_object((rank, 1)),
    }


def trees():
    vector, matrix = torch.arange(2.0), torch.arange(4).reshape(2, 2)
    sent = send_to_device({"a": vector, "b": [matrix, "text", 3]}, "cpu")
    return {
        "concatenate": concatenate([vector, vector + 5]),
        "concatenate dicts": concatenate([{"a": vector, "b": (matrix,)}, {"a": vector, "b": (matrix,)}]),
        "concatenate dim": concatenate([matrix, matrix], dim=1),
        "concatenate named": concatenate([Pair(vector, matrix), Pair(vector, matrix)]),
        "concatenate text": attempt(lambda: concatenate(["a", "b"])),
        "send": sent,
        "send named": send_to_device(Pair(vector, matrix), torch.device("cpu")),
        "send skipping keys": send_to_device({"a": vector, "b": matrix}, "cpu", skip_keys="b"),
        "send text": send_to_device("text", "cpu"),
        "apply": recursively_apply(lambda tensor: tensor + 1, {"a": vector, "b": [matrix, "text", None]}),
        "apply arguments": recursively_apply(lambda tensor, by, more=0: tensor * by + more, (vector,), 3, more=1),
        "apply other type": recursively_apply(str, [1, "a", 2.0], test_type=lambda value: isinstance(value, int)),
        "apply refusing": attempt(lambda: recursively_apply(abs, [vector, "text"], error_on_other_type=True)),
        "apply to one": recursively_apply(lambda tensor: tensor + 1, vector),
        "batch size": [
            find_batch_size(item) for item in (matrix, [matrix], {"a": vector, "b": matrix}, Pair(vector, matrix))
        ],
        "batch size of text": attempt(lambda: find_batch_size("text")),
        "slice": slice_tensors({"a": vector, "b": matrix}, slice(1)),
        "full precision": convert_to_fp32({"a": vector.half(), "b": matrix, "c": [vector.bfloat16()]}),
    }


def trigger():
    accelerator = fresh()
    seen = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]


def splits():
    accelerator = fresh()
    found = {}
    for length in (0, 1, 2, 3, 4, 5):
        inputs = {
            "list": [f"item {place}" for place in range(length)],
            "tuple": tuple(range(length)),
            "tensor": torch.arange(length),
            "matrix": torch.arange(2 * length).reshape(length, 2),
            "dict of lists": {"a": list(range(length)), "b": [str(place) for place in range(length)]},
            "dict of tensors": {"a": torch.arange(length), "b": torch.arange(length) * 2.0},
            "text": "abcdef"[:length],
        }
        for kind, value in inputs.items():
            for padding in (False, True):
                # With padding, Accelerate divides tensors by collectives that the ranks enter with different sizes
                # when there are fewer items than processes: gloo aborts the process.
                if padding and length < 2 and ("tensor" in kind or kind == "matrix"):
                    continue
                found[f"{kind} of {length}, apply_padding={padding}"] = attempt(
                    lambda value=value, padding=padding: taken(accelerator, value, padding)
                )
    found["uneven dict"] = attempt(lambda: taken(accelerator, {"a": [1, 2], "b": [1]}, False))
    with PartialState().split_between_processes([1, 2, 3]) as part:
        found["through the state"] = part
    return found


def taken(accelerator, value, padding):
    with accelerator.split_between_processes(value, apply_padding=padding) as part:
        return part


def decorators():
    accelerator = fresh()
    last = accelerator.num_processes - 1
    return {
        "main": accelerator.on_main_process(lambda: "ran")(),
        "local main": accelerator.on_local_main_process(lambda: "ran")(),
        "last": accelerator.on_last_process(lambda: "ran")(),
        "process": accelerator.on_process(process_index=last)(lambda: "ran")(),
        "process, direct": accelerator.on_process(lambda: "ran", process_index=last)(),
        "local process": accelerator.on_local_process(local_process_index=0)(lambda: "ran")(),
        "partial state, main": PartialState().on_main_process(lambda: "ran")(),
    }


def metrics():
    found = {}
    for samples in (1, 2, 3, 5, 8, 9, 13):
        for batch in (1, 2, 4):
            accelerator = fresh()
            loader = accelerator.prepare(DataLoader(range(samples), batch_size=batch))
            seen = {"tensor": [], "structure": [], "objects": [], "repeated": [], "repeated objects": [], "value": []}
            for values in loader:
                seen["tensor"] += accelerator.gather_for_metrics(values).tolist()
                pair = accelerator.gather_for_metrics((values, {"twice": values * 2}))
                seen["structure"] += pair[1]["twice"].tolist()
                seen["objects"] += accelerator.gather_for_metrics(
                    [f"s{value}" for value in values.tolist()], use_gather_object=True
                )
                # As for a full batch, also at the end: how the Trainer of transformers evaluates.
                loss = values[0].float()
                seen["repeated"] += accelerator.gather_for_metrics({"loss": loss.repeat(batch)})["loss"].tolist()
                seen["repeated objects"] += accelerator.gather_for_metrics([f"s{values[0]}"] * batch)
                if accelerator.num_processes == 1:
                    seen["value"] += [accelerator.gather_for_metrics(loss), accelerator.gather_for_metrics([loss])]
            found[f"samples={samples} batch={batch}"] = seen
    return found
