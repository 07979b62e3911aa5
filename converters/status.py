"""How far a conversion is, from its state folder alone; works while it runs, from any machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp4.converters.checkpoint import INDEX_NAME
from mxfp4.converters.state import OutputFolder
from mxfp4.errors import OutputError


@dataclass(frozen=True, slots=True)
class Status:
    """Finished and planned output of one folder."""

    output: str
    plan: str
    shards_done: int
    shards_total: int
    bytes_done: int
    bytes_total: int
    complete: bool
    """Whether the index is written, which is the last step."""
    running: bool
    """Whether a process holds the folder's lock."""

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {name: getattr(self, name) for name in self.__slots__}


def status(output: str | Path) -> Status:
    """Read plan and records; raises `OutputError` if no conversion was ever begun here."""
    folder = OutputFolder(Path(output))
    plan = folder.stored_plan()
    if plan is None:
        raise OutputError(
            "no conversion was begun in this folder",
            file=str(output),
            hint="give the output folder of `mxfp4 convert`",
        )
    shards = plan["shards"]
    done = [s for s in shards if folder.finished(plan["id"], s["name"]) is not None]
    return Status(
        output=str(output),
        plan=plan["id"],
        shards_done=len(done),
        shards_total=len(shards),
        bytes_done=sum(shard["bytes"] for shard in done),
        bytes_total=sum(shard["bytes"] for shard in shards),
        complete=len(done) == len(shards) and (folder.path / INDEX_NAME).is_file(),
        running=folder.is_locked(),
    )
