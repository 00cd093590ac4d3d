"""Which samples each rank sees, in what order."""

import itertools

import torch
from accelerate import DataLoaderConfiguration
from accelerate.utils import set_seed
from notes import attempt, fresh, plain
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from training import where


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class SizedStream(Stream):
    def __len__(self):
        return self.length


class Growing:
    """A batch sampler without a batch size: 1, 2, 3, … samples."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        count = itertools.count()
        return iter([[next(count) for _ in range(size + 1)] for size in range(self.batches)])

    def __len__(self):
        return self.batches


def scenarios():
    found = {}
    sizes, batches, yes_no = (1, 2, 3, 5, 8, 11, 16), (1, 2, 4), (False, True)
    for samples, batch, drop, even, split in itertools.product(sizes, batches, yes_no, yes_no, yes_no):
        if split and batch % 2:
            continue
        name = f"samples={samples} batch={batch} drop_last={drop} even_batches={even} split_batches={split}"
        layout = {"even_batches": even, "split_batches": split}
        ranged = {"dataset": range(samples), "batch_size": batch, "drop_last": drop}
        found[f"order/map/{name}"] = lambda ranged=ranged, layout=layout: order(ranged, layout)
        stream = {**ranged, "dataset": Stream(samples)}
        found[f"order/iterable/{name}"] = lambda stream=stream, layout=layout: order(
            stream, {**layout, "dispatch_batches": False}
        )
        stream = {**ranged, "dataset": SizedStream(samples)}
        found[f"order/sized iterable/{name}"] = lambda stream=stream, layout=layout: order(
            stream, {**layout, "dispatch_batches": False}
        )
    for samples, even in itertools.product((1, 2, 5, 6), yes_no):
        layout = {"even_batches": even}
        kinds = {
            "own batch sampler": {"dataset": range(100), "batch_sampler": Growing(samples)},
            "batch_size None": {"dataset": range(samples), "batch_size": None},
            "torch batch sampler": {
                "dataset": range(samples),
                "batch_sampler": BatchSampler(SequentialSampler(range(samples)), 2, False),
            },
        }
        for kind, loader in kinds.items():
            name = f"order/{kind}/samples={samples} even_batches={even}"
            found[name] = lambda loader=loader, layout=layout: order(loader, layout)
    found["order/batch indivisible by ranks"] = lambda: order(
        {"dataset": range(9), "batch_size": 3}, {"split_batches": True}
    )
    found["order/split asked of the constructor"] = lambda: order(
        {"dataset": range(8), "batch_size": 4}, {}, split_batches=True, config=False
    )
    for samples, batch, split in itertools.product((8, 16, 24), (2, 4), yes_no):
        name = f"samples={samples} batch={batch} split_batches={split}"
        tensors = {"dataset": torch.arange(samples), "batch_size": batch}
        layout = {"split_batches": split, "dispatch_batches": True}
        found[f"dispatch/map/{name}"] = lambda tensors=tensors, layout=layout: order(tensors, layout)
    for skipped, shuffle in itertools.product((0, 1, 3), yes_no):
        found[f"skip/batches={skipped} shuffle={shuffle}"] = lambda skipped=skipped, shuffle=shuffle: skip(
            skipped, shuffle
        )
    found |= {f"shuffle/{name}": run for name, run in shuffles().items()}
    found["nested loaders"] = nested
    found["stopped early"] = stopped_early
    return found


def order(loader_options, layout, epochs=2, config=True, **options):
    if config:
        options["dataloader_config"] = DataLoaderConfiguration(**layout)
    accelerator = fresh(**options)
    loader = accelerator.prepare(DataLoader(**loader_options))
    seen = {"length": attempt(lambda: len(loader)), "batches": [], "places": []}
    for _ in range(epochs):
        for batch in loader:
            seen["batches"].append(batch.tolist() if isinstance(batch, torch.Tensor) else plain(batch))
            seen["places"].append(where(accelerator.gradient_state))
        seen["after"] = where(accelerator.gradient_state)
    seen["total_batch_size"] = attempt(lambda: loader.total_batch_size)
    seen["total_dataset_length"] = attempt(lambda: loader.total_dataset_length)
    return seen


def skip(batches, shuffle):
    accelerator = fresh()
    set_seed(7)
    loader = accelerator.prepare(DataLoader(range(15), batch_size=2, shuffle=shuffle))
    short = accelerator.skip_first_batches(loader, batches)
    seen = {"length": len(short), "first": [], "later": []}
    for batch in short:
        seen["first"].append(batch.tolist())
    for batch in loader:
        seen["later"].append(batch.tolist())
    return seen


def shuffles():
    shuffled = {"dataset": range(16), "batch_size": 2, "shuffle": True}

    def seeded(layout=None, seed=7, draws=False, epochs=3, **loader):
        def run():
            accelerator = fresh(dataloader_config=DataLoaderConfiguration(**(layout or {})))
            set_seed(seed)
            made = accelerator.prepare(DataLoader(**shuffled, **loader))
            seen = {"prepared": torch.get_rng_state().sum().item(), "epochs": [], "draws": []}
            for _ in range(epochs):
                seen["epochs"].append([batch.tolist() for batch in made])
                if draws:
                    seen["draws"].append(torch.rand(2).tolist())
            return seen

        return run

    def with_generator():
        return seeded(generator=torch.Generator().manual_seed(3))()

    def seeded_before():
        set_seed(7)
        loader = DataLoader(**shuffled)
        accelerator = fresh()
        made = accelerator.prepare(loader)
        return [[batch.tolist() for batch in made] for _ in range(3)]

    def set_epoch():
        accelerator = fresh(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        set_seed(7)
        made = accelerator.prepare(DataLoader(**shuffled))
        seen = []
        for epoch in (4, 0, 9):
            made.set_epoch(epoch)
            seen.append([batch.tolist() for batch in made])
        return seen

    return {
        "default": seeded(),
        "default, draws between epochs": seeded(draws=True),
        "seeded before the accelerator": seeded_before,
        "own generator": with_generator,
        "seedable": seeded({"use_seedable_sampler": True}),
        "seedable, data_seed": seeded({"use_seedable_sampler": True, "data_seed": 5}),
        "seedable, own generator": lambda: seeded(
            {"use_seedable_sampler": True}, generator=torch.Generator().manual_seed(3)
        )(),
        "seedable, set_epoch": set_epoch,
    }


def nested():
    """An evaluation loop inside the training loop."""
    accelerator = fresh(gradient_accumulation_steps=2)
    outer, inner = accelerator.prepare(DataLoader(range(10), batch_size=2), DataLoader(range(5), batch_size=2))
    seen = []
    for number, _ in enumerate(outer):
        seen.append(where(accelerator.gradient_state))
        if number == 1:
            for _ in inner:
                seen.append(where(accelerator.gradient_state))
        seen.append(where(accelerator.gradient_state))
    return [*seen, where(accelerator.gradient_state)]


def stopped_early():
    """A loop left by break, then a whole one."""
    accelerator = fresh()
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2))
    for _ in loader:
        break
    seen = [batch.tolist() for batch in loader]
    return [seen, where(accelerator.gradient_state)]
