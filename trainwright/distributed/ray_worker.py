"""Ray: what Ray Train tells its worker in this process. Only this file and callbacks/ray_report.py call Ray."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""How the path of a folder begins here, by the type of Ray's file system."""


class RayStorage(NamedTuple):
    """The folder of a run of Ray Train, which all of its workers reach."""

    folder: str
    """A path or a URL."""
    scheme: str
    filesystem: Any
    """Ray's object for the file system, whose paths lack the scheme."""


def ray_train() -> Any:
    """Return the module `ray.train` in a worker of Ray Train, or None in any other process."""
    train: Any = sys.modules.get("ray.train")  # a worker has imported it
    if not hasattr(train, "CheckpointUploadMode"):  # Ray Train V1 has neither this nor another name that is used here
        return None
    try:
        train.get_context()
    except (RuntimeError, DeprecationWarning):  # this is the driver, or a function of Ray Tune
        return None
    return train


def ray_storage() -> RayStorage | None:
    """Return where this worker's run is stored, or None outside of a worker and for a file system that is not known here."""
    train = ray_train()
    try:
        storage = None if train is None else train.get_context().get_storage()
    except NotImplementedError:  # a job without workers, which has no storage
        return None
    scheme = None if storage is None else SCHEMES.get(storage.storage_filesystem.type_name)
    if storage is None or scheme is None:
        return None
    return RayStorage(scheme + storage.experiment_fs_path, scheme, storage.storage_filesystem)
