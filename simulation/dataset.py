"""A run's data set in shared memory: one copy for all processes of a simulation."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from flwr_distill.simulation.frames import SharedArrays, SharedMemoryError
from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples
from flwr_distill.task.source import ReadDataset

_SPEC = TypeAdapter(DataSpec)


def write_dataset(read: ReadDataset, shared: SharedArrays, folder: Path) -> dict[str, Any] | None:
    """Write a data set into the folder of shared arrays; return what `map_dataset` takes, as JSON.

    None if there is not room for it twice, or a plug-in gave it a spec that JSON cannot carry, or
    samples of a class of its own.
    """
    parts = {"train": read.dataset.train, "test": read.dataset.test}
    arrays: dict[str, Any] = {}
    for part, samples in parts.items():
        arrays |= {f"{part}.images": samples.images, f"{part}.labels": samples.labels}
    if {type(read.dataset), *map(type, parts.values())} != {Dataset, RawSamples}:
        return None
    if shutil.disk_usage(folder).free < 2 * sum(array.nbytes for array in arrays.values()):
        return None
    try:
        spec = _SPEC.dump_python(read.dataset.spec, mode="json", warnings="error")
        restored = _SPEC.validate_python(spec)
        if (restored, repr(restored)) != (read.dataset.spec, repr(read.dataset.spec)):
            return None  # fingerprints have its text
        written = shared.write_arrays(arrays)
    except (ValueError, SharedMemoryError):  # of pydantic; others have taken the room
        return None
    return {"key": read.key, "state": read.state.hex(), "spec": spec, "arrays": written}


def map_dataset(written: Mapping[str, Any], shared: SharedArrays) -> ReadDataset:
    """Map the data set that another process, or this one, has written."""
    arrays: dict[str, Any] = {
        name: array.values for name, array in shared.read(written["arrays"]).items()
    }
    train, test = (
        RawSamples(arrays[f"{part}.images"], arrays[f"{part}.labels"]) for part in ("train", "test")
    )
    *key, split = written["key"]
    return ReadDataset(
        key=(*key, split and tuple(split)),
        state=bytes.fromhex(written["state"]),
        dataset=Dataset(_SPEC.validate_python(written["spec"]), train, test),
    )
