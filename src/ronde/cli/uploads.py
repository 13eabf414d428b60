"""``ronde run --upload``: the run directory and the store that its checkpoints go to."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ronde.watch import RunDir, Warned, append_events, claim_run_dir, lock_run
from ronde.world import CheckpointError

if TYPE_CHECKING:
    from ronde.checkpoint import RemoteCheckpoints


def has_whole(url: str | None, name: str) -> bool:
    """Whether a store has a checkpoint of a run to go on from."""
    from ronde.checkpoint import RemoteCheckpoints

    return url is not None and any(RemoteCheckpoints(url, name).steps().values())


def claim_with_uploads(
    url: str | None,
    runs: Path,
    name: str | None,
    stem: str,
    resume: bool,
    tell: Callable[[str], None],
) -> tuple[RunDir, RemoteCheckpoints | None]:
    """Create the run's directory, or find it to resume, with the newest checkpoint of the store.

    Args:
        tell: gets what was fetched, and what was passed over.

    Raises:
        CheckpointError: there is nothing to resume, or the store has a run of this name.
    """
    fresh = url is not None and name is not None and not (runs / name).exists()
    directory = claim_run_dir(runs, name, stem, resume and not fresh)
    # a script's second training writes there, and would go on from it after a restart
    second = RunDir(runs / f"{directory.name}.2")
    if (fresh or not resume) and second.in_use and not second.logs.exists():
        directory.path.rmdir()  # claimed just now
        raise CheckpointError(
            f"{second.path} is the second training of an earlier run {directory.name!r}. Remove "
            "it, or choose another --name."
        )
    lock_run(directory)
    if url is None:
        return directory, None
    from ronde.checkpoint import RemoteCheckpoints, find_valid

    store = RemoteCheckpoints(url, directory.name)
    try:
        if not resume:
            if has_whole(url, directory.name):
                raise CheckpointError(
                    f"{store.url} has checkpoints of a run already. Continue it "
                    f"with --resume --name {directory.name}, or choose another --name."
                )
            store.claim()
            return directory, store
        own, _ = find_valid(directory.checkpoints)
        fetched, passed = store.fetch(directory.checkpoints, -1 if own is None else own.step)
        for each in passed:
            tell(f"passed over: {each}")
        if fetched is not None:
            tell(f"fetched {fetched.name} from {store.url}")
        elif fresh:
            raise CheckpointError(
                f"nothing to resume: {runs / directory.name} does not exist, and {store.url} has "
                "no whole checkpoint."
            )
        store.claim()
    except BaseException:
        if fresh or not resume:
            shutil.rmtree(directory.path, ignore_errors=True)
        raise
    return directory, store


def uploading(
    store: RemoteCheckpoints | None, directory: RunDir, tell: Callable[[str], None]
) -> contextlib.AbstractContextManager[Any]:
    """Upload the checkpoints while the block runs; the record has each failure, too."""
    if store is None:
        return contextlib.nullcontext()
    from ronde.checkpoint import Uploads

    def noted(text: str) -> None:
        tell(text)
        # Uploads say progress, too, which the record does not need.
        kind, _, warning = text.partition("warning: ")
        if warning and not kind and directory.record.is_file():
            with contextlib.suppress(OSError):  # a full disk must not end the upload
                append_events(directory.record, Warned(text=warning))

    return Uploads(store, directory.path, noted)
