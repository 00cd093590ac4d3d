"""Codes of errors, of the guard's findings and of warnings: one table, which messages cite and the pages are made from.

A code never changes its meaning; one that is no longer used is not reused. LS1xxx are exceptions, LS2xxx
failures of a job, LS3xxx warnings.
"""

from __future__ import annotations

from typing import NamedTuple


class CodeEntry(NamedTuple):
    """What is known about one code."""

    title: str
    """In a few words."""
    source: str
    """Where it comes from: the name of an exception, the kind of a finding, or the name of a logger."""
    happened: str
    """What happened."""
    why: str
    """What it usually comes from."""
    fix: str
    """What to do."""
    page: str
    """The page with more."""


ENTRIES: dict[str, CodeEntry] = {
    # ---------------------------------------------------------------- exceptions
    "LS1000": CodeEntry(
        "an error of Lockstep",
        "LockstepError",
        "Lockstep raised an error that has no code of its own.",
        "This is the root of all errors that Lockstep raises on purpose; each of them has a code of its own.",
        "Read the message. If it is not clear, open an issue: an unclear message is a bug.",
        "troubleshooting.md",
    ),
    "LS1001": CodeEntry(
        "a setting cannot be used",
        "ConfigError",
        "An argument, a flag, an environment variable or a key of the configuration file has a value that is "
        "not allowed. "
        "Nothing was started.",
        "A typing error, settings that exclude each other, or a variable left over from another job.",
        "Correct the setting that the message names; all wrong settings are listed at once. `lockstep env` and "
        "`lockstep launch --dry_run` show where each value comes from.",
        "settings.md",
    ),
    "LS1002": CodeEntry(
        "not supported yet",
        "NotYetError",
        "A setting that Accelerate knows was asked for, and this release does not support it.",
        "The engine or option is not built yet. It is refused because a run without it would be another run.",
        "Leave the setting out; the migration page lists what is missing and what to use instead.",
        "migration.md",
    ),
    "LS1003": CodeEntry(
        "a call that cannot work here",
        "UsageError",
        "A method was called in a place or in an order in which it cannot work.",
        "Often an object that was not passed to `prepare`, a step inside an open accumulation window, or an "
        "accelerator "
        "that is used after `end_training`.",
        "Change the call as the message says.",
        "training-loop.md",
    ),
    "LS1004": CodeEntry(
        "a sample or batch cannot be used",
        "DataError",
        "A sample or a batch could not be read, or could not be divided between the ranks.",
        "A damaged file, a worker process that was killed, or a dataset whose length differs between ranks.",
        "The message names the sample, its worker and the rank. Read that sample alone: `dataset[index]`.",
        "data.md",
    ),
    "LS1005": CodeEntry(
        "NaN or inf stopped the run",
        "NumericsError",
        "A loss, a gradient or the output of a module became NaN or infinite, and the run was set to stop then; or the "
        "trace that was asked for is complete.",
        "A learning rate that is too high, fp16 without loss scaling, a division by zero, or a bad sample.",
        'The message names the module, the rank and the samples. `nan_policy="skip"` drops such updates on all ranks.',
        "numerics.md",
    ),
    "LS1006": CodeEntry(
        "a checkpoint cannot be written or read",
        "CheckpointError",
        "A checkpoint or a model file could not be written, could not be read, or does not fit the objects "
        "of this run.",
        "A full disk, a damaged or incomplete file, or a model that is not the one that was saved.",
        "`lockstep checkpoint verify FOLDER` names damaged files. A save that failed leaves the previous "
        "checkpoint unchanged.",
        "checkpoints.md",
    ),
    "LS1007": CodeEntry(
        "the processes do not form a job",
        "TopologyError",
        "The processes could not be put together into one job.",
        "Variables of two launchers at once, different world sizes, a port that is in use, or nodes that "
        "cannot reach the "
        "rendezvous.",
        "`lockstep env` shows what each process sees; `lockstep doctor net` tests the network between the nodes.",
        "clusters.md",
    ),
    "LS1008": CodeEntry(
        "no batch size fits",
        "OutOfMemory",
        "Even the smallest batch that was tried does not fit into memory.",
        "The model, its gradients and the optimizer's state take nearly all memory, or another process uses "
        "the device.",
        "`lockstep estimate` shows what takes the memory. Use a smaller model, mixed precision or another optimizer.",
        "memory.md",
    ),
    "LS1009": CodeEntry(
        "another rank failed",
        "PeerFailure",
        "This rank is healthy. Another rank failed, or the connection to it broke.",
        "The cause is on the rank that the message names.",
        "Read that rank's error first; `lockstep launch` shows it last on the screen, and the run directory keeps it.",
        "guard.md",
    ),
    "LS1010": CodeEntry(
        "a started function failed on a rank",
        "RankFailed",
        "A function that was started on several processes, from a notebook or by `debug_launcher`, failed on "
        "one of them.",
        "The error is in that function; the message has the rank, its exception and its traceback.",
        "Correct the error that the message shows.",
        "notebooks.md",
    ),
    "LS1011": CodeEntry(
        "ranks called a collective differently",
        "DistributedOperationException",
        "Ranks called one collective with other shapes, dtypes, structures, or called different collectives.",
        "Often a last batch that is smaller on one rank, padding to the longest of each rank's own batch, or a call "
        "under a condition that holds on some ranks only.",
        "`accelerator.pad_across_processes` before the call, `gather_for_metrics` instead of `gather`, and "
        "the same calls "
        "in the same order on every rank.",
        "troubleshooting.md#shapes-that-do-not-match",
    ),
    "LS1012": CodeEntry(
        "a tracker of your own is incomplete",
        "IncompleteTracker",
        "A subclass of a tracker was used that does not define all that a tracker needs.",
        "A method or an attribute is missing, or has another name.",
        "Define what the message names; the page on trackers has a complete example.",
        "tracking.md",
    ),
    # ---------------------------------------------------------------- failures of a job
    "LS2001": CodeEntry(
        "ranks wait in different calls",
        "different ops",
        "Ranks wait in different collectives at the same point, so none of them can complete. The job was stopped.",
        "A condition that holds on some ranks only, a loop that one rank left early, or an exception that "
        "was caught on "
        "one rank.",
        "Let all ranks make the same calls in the same order. To leave a loop, use `set_trigger` and `check_trigger`.",
        "guard.md",
    ),
    "LS2002": CodeEntry(
        "arguments of a collective differ",
        "different arguments",
        "All ranks called the same collective, with shapes, dtypes or structures that do not fit together.",
        "A smaller last batch on one rank, or padding that differs between ranks.",
        "`accelerator.pad_across_processes` before the call, or `gather_for_metrics`.",
        "troubleshooting.md#shapes-that-do-not-match",
    ),
    "LS2003": CodeEntry(
        "torch's collectives differ",
        "different torch calls",
        "Ranks called different collectives of `torch.distributed` itself, or one with different shapes.",
        "A collective under a condition on the rank, or parameters that take part in the backward on some ranks only.",
        "Let all ranks make the same calls. For parameters without a gradient set `find_unused_parameters=True`.",
        "guard.md",
    ),
    "LS2004": CodeEntry(
        "a rank is gone while others wait",
        "gone",
        "Ranks wait in a collective for a rank that has finished, failed or was killed. The job was stopped.",
        "A loop that ended earlier on that rank, an exception there, or the operating system's out-of-memory killer.",
        "Read how that rank ended. Give every rank as many batches: prepare the loader, or use `join_uneven_inputs`.",
        "guard.md",
    ),
    "LS2005": CodeEntry(
        "ranks wait for one that is elsewhere",
        "missing",
        "Ranks have waited in a collective for a rank that is alive and runs other code. The wait may still end.",
        "Slow work on one rank (evaluation, a download, writing a file), or a rank that will not make the call.",
        "`lockstep stacks` shows where it is. Move such work outside the others' wait, or raise "
        "`LOCKSTEP_STALL_SECONDS`.",
        "guard.md",
    ),
    "LS2006": CodeEntry(
        "a wait outside the library's collectives",
        "raw",
        "Ranks are blocked in collectives that the script called on `torch.distributed` directly.",
        "A call that not every rank makes.",
        "Let every rank make the call; with `accelerator.gather` and its siblings the guard can name the difference.",
        "guard.md",
    ),
    "LS2007": CodeEntry(
        "all ranks wait in the same collective",
        "all wait",
        "All ranks are in the same collective, and it does not complete.",
        "The network between the ranks, a device that does not respond, or a driver.",
        "`lockstep doctor net` tests every pair of ranks; `lockstep doctor nccl LOG` reads NCCL's logs.",
        "doctor.md",
    ),
    "LS2010": CodeEntry(
        "a rank raised an exception",
        "exception",
        "The script raised an exception that is not one of Lockstep's on the rank that the message names.",
        "See the exception and the line.",
        "Correct the line that the message shows. Other ranks' errors follow from this one.",
        "troubleshooting.md",
    ),
    "LS2011": CodeEntry(
        "a rank was killed",
        "signal",
        "A signal ended the process of a rank.",
        "SIGKILL: the operating system's out-of-memory killer, or somebody. SIGSEGV, SIGABRT, SIGBUS: native code.",
        "Look into `dmesg` and at the limits of the container or the batch system. The box shows what the "
        "rank did last.",
        "troubleshooting.md#out-of-memory",
    ),
    "LS2012": CodeEntry(
        "a rank exited",
        "exit",
        "The process of a rank ended with a non-zero exit code, without an exception.",
        "`sys.exit`, `os._exit`, or native code that ends the process.",
        "Look at the end of that rank's stderr in the run directory.",
        "run-directory.md",
    ),
    "LS2013": CodeEntry(
        "out of memory",
        "out of memory",
        "A device or the host ran out of memory on the rank that the message names.",
        "A batch that is too large, a longer sequence than before, or tensors that are kept from step to step.",
        "`find_executable_batch_size`, a smaller batch, or mixed precision. The report lists what took the memory.",
        "memory.md",
    ),
    "LS2014": CodeEntry(
        "a node is lost",
        "node",
        "The launcher of a node does not answer, and the other nodes lost the connection to it.",
        "The node went down, was preempted, or the network to it broke.",
        "Look whether the node is up and at what the scheduler recorded. Start the job again: it resumes from its "
        "last checkpoint.",
        "launch.md",
    ),
    # ---------------------------------------------------------------- warnings
    "LS3000": CodeEntry(
        "a warning of Lockstep",
        "lockstep",
        "The library logged a warning that has no code of its own.",
        "See the message.",
        "Read the message. If it is not clear, open an issue: an unclear message is a bug.",
        "troubleshooting.md",
    ),
    "LS3001": CodeEntry(
        "the run's settings do not fit together",
        "lockstep.run",
        "A schedule, an optimizer or an accumulation setting does not do what it seems to.",
        "A schedule that is longer than the training, one that was not prepared, or one that is stepped twice.",
        "Compare the numbers in the message; prepare the scheduler with the loader.",
        "training-loop.md",
    ),
    "LS3002": CodeEntry(
        "an object was prepared in an unusual way",
        "lockstep.prepare",
        "A prepared object changed after `prepare`, or was prepared without what belongs to it.",
        "Parameters that were frozen, unfrozen or added, or a model that was replaced.",
        "Prepare the object again after the change.",
        "training-loop.md",
    ),
    "LS3003": CodeEntry(
        "replicas differ",
        "lockstep.replicas",
        "The weights of a model are no longer the same on all ranks.",
        "An update that one rank made alone, an in-place change of a parameter, or hardware that computes differently.",
        "The message names the first parameter and the rank. Make every change of weights on all ranks.",
        "guard.md#replicas-stay-replicas",
    ),
    "LS3004": CodeEntry(
        "a checkpoint needs attention",
        "lockstep.checkpoint",
        "A checkpoint was skipped, is incomplete, or was written in another way than asked.",
        "An interrupted save, a damaged file, or a name that is in use.",
        "`lockstep checkpoint ls` and `verify` show the state of each checkpoint.",
        "checkpoints.md",
    ),
    "LS3005": CodeEntry(
        "a model file differs from what was expected",
        "lockstep.model_files",
        "A file of weights has names that the model lacks, lacks some, or exists in two forms.",
        "Weights of another version of the model, or two formats in one folder.",
        "Compare the names in the message; remove the form that you do not want.",
        "checkpoints.md",
    ),
    "LS3006": CodeEntry(
        "NaN or inf",
        "lockstep.numerics",
        "A loss or gradient became NaN or infinite, or a module produced such a value.",
        "See LS1005.",
        'Find the module with `debug="underflow_overflow"`; `nan_policy` sets what happens.',
        "numerics.md",
    ),
    "LS3007": CodeEntry(
        "data is divided in an unexpected way",
        "lockstep.data",
        "Samples were repeated or left out, or metrics could not be cut to the dataset's length.",
        "An iterable dataset whose stream differs between ranks, or a sampler of your own.",
        "The message names the samples. `use_seedable_sampler` makes the order a function of the seed.",
        "data.md",
    ),
    "LS3008": CodeEntry(
        "a batch does not fit into memory",
        "lockstep.memory",
        "A batch did not fit, and a smaller one is tried on all ranks.",
        "See LS2013.",
        "Nothing, if training continues. Start with the size that was found to save the attempts.",
        "memory.md",
    ),
    "LS3009": CodeEntry(
        "weights are placed in an unexpected way",
        "lockstep.offload",
        "A device map, an empty model or offloaded weights are not as asked for.",
        "Memory limits that are too small, tied parameters that were divided, or modules that the map does not name.",
        "Compare the names in the message with the device map.",
        "memory.md",
    ),
}
"""Code -> what it stands for."""

_BY_SOURCE = {entry.source: code for code, entry in ENTRIES.items()}


def code_of(source: str) -> str:
    """The code of an exception's name, of a finding's kind or of a logger's name; empty when there is none."""
    while source:
        if source in _BY_SOURCE:
            return _BY_SOURCE[source]
        source = source.rpartition(".")[0]  # a logger below another
    return ""


def cite(code: str) -> str:
    """How a message refers to a code, at its end."""
    return f"More: lockstep explain {code}"
