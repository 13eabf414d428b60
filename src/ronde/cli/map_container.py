"""``ronde map`` in a SageMaker container: this host's items, and its own folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ronde.world import ArgumentError

if TYPE_CHECKING:
    from ronde.jobs.items import Items
    from ronde.launch import Container


def folder_of_host(box: Container, out: Path) -> Path:
    """Where this host writes: the service may join the folders of all hosts.

    Raises:
        ArgumentError: the service copies that folder while it changes.
    """
    if box.checkpoints is not None and out.is_relative_to(box.checkpoints):
        raise ArgumentError(
            f"--out {out}: the service copies {box.checkpoints} to an object store file by file, "
            "which has no rename: a map there could not be resumed. Give another folder."
        )
    return out / box.current if len(box.hosts) > 1 else out


def items_of_host(box: Container, source: str) -> Items | None:
    """The items that this host does; None if there are none for it.

    A channel with ShardedByS3Key has other files on each host: it does them all. One with
    FullyReplicated has the same everywhere: each host does a part, neighbours of about as many
    bytes, so that the outputs of all hosts in their order are those of one.

    Raises:
        ArgumentError: there are no such items, or nothing says whether other hosts have them too.
    """
    from ronde.jobs.items import find_items
    from ronde.jobs.map_plan import host_parts

    if len(box.hosts) == 1:
        return find_items(source)
    file = re.split(r"[*?[]", re.sub(r"^(lines:|rows:|@)", "", source))[0]
    path = Path(file).absolute()
    channel = next((c for c in box.inputs if path.is_relative_to(c)), None)
    if channel is None:
        named = ", ".join(str(c) for c in box.inputs) or "none"
        raise ArgumentError(
            f"--items {source}: in no channel of this container ({named}), so nothing says whether "
            f"the other {len(box.hosts) - 1} hosts have the same items."
        )
    spread = box.inputs[channel]
    if spread == "ShardedByS3Key":
        is_empty = not any(p.is_file() for p in channel.rglob("*"))
        return None if is_empty else find_items(source)
    if spread != "FullyReplicated":
        raise ArgumentError(
            f"--items {source}: channel {channel} is of {spread}: give it File or FastFile mode, "
            "with ShardedByS3Key or FullyReplicated."
        )
    items = find_items(source)
    low, high = host_parts(items, len(box.hosts))[box.rank]
    return items.part(low, high) if low < high else None
