"""Which launch uploads to a remote store: `<url>/writer.json` names it, and the last one to claim the place has it."""

from __future__ import annotations

from mpi_ckpt.errors import RemoteFailed
from mpi_ckpt.storage import manifest_json
from mpi_ckpt.storage.object_store import ObjectStore, put_in_place

_WRITER = "writer.json"


class Claim:
    """A launch's claim to a store, held by the one process that decides for it."""

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        self._content = manifest_json.canonical({"launch_id": launch_id}).encode()
        self._taken = False
        self._successor: str | None = None  # who has it now

    def hold(self, store: ObjectStore) -> None:
        """**Local.** Before anything is put or deleted there: claim the place, or see that it is still this launch's.

        Not before that: a launch that ends without a step to upload would have taken the place from the one that
        uploads. And not later: what is put or deleted without a claim may be the work of that one. Raises RemoteFailed
        when another launch has claimed it since; from then on always: the place is that one's even when it is emptied.
        """
        found = store.get(_WRITER) if self._taken else None
        if found is not None and found[0] != self._content:
            self._successor = " ".join(found[0].decode(errors="replace").split())
        if self._successor is not None:
            raise RemoteFailed(
                "another launch uploads to the same place",
                path=f"{store.url}/{_WRITER}",
                found=self._successor,
                expected=f"launch {self._launch_id}",
                action="Give each run a URL of its own, and end what else uploads there.",
            )
        if found is None:  # or somebody has emptied the place, which says nothing of who uploads
            put_in_place(store, _WRITER, self._content, f"that of launch {self._launch_id}")
            self._taken = True
