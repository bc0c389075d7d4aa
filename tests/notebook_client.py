"""Runs a notebook in a real kernel. Imports nbclient, which not every environment of the tests has."""

from __future__ import annotations

import time
from pathlib import Path
from queue import Empty
from typing import Any

from deadlines import deadline
from nbclient import NotebookClient


class PollingClient(NotebookClient):  # type: ignore[misc]
    """Asks for a reply again every second: a reply that arrives during a send may wake no thread.

    ZeroMQ signals a socket's new state once, and the sending, through another object, has consumed that signal.
    """

    async def async_start_new_kernel_client(self) -> Any:
        client = await super().async_start_new_kernel_client()
        channel = client.shell_channel
        get = channel.get_msg

        async def get_msg(timeout: float | None = None) -> Any:
            end = time.monotonic() + (float("inf") if timeout is None else timeout)
            while True:
                try:
                    return await get(timeout=max(min(1.0, end - time.monotonic()), 0.0))
                except Empty:
                    if time.monotonic() >= end:
                        raise

        channel.get_msg = get_msg
        return client


def run_notebook(notebook: Any, folder: Path | None = None, **options: Any) -> None:
    """Run the cells, by default in the current folder, and put their outputs into the notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    if folder is not None:
        options["resources"] = {"metadata": {"path": str(folder)}}
    PollingClient(notebook, timeout=int(deadline(300)), kernel_name="python3", **options).execute()
