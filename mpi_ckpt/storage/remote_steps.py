"""Steps in a remote store: how one becomes visible there, how it is read, and how it goes.

    <url>/step_00000010/<save id>/rank00002.h5     put first, by the ranks
    <url>/step_00000010/upload_manifest.json       put last, by one

A step is remotely committed if and only if its upload manifest exists. The save id is in the keys of the shards, so a
step that is saved again never puts bytes under a manifest that is live; and when it goes, its manifest goes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from mpi_ckpt.errors import InvalidManifest, MissingShard, NoCheckpoint
from mpi_ckpt.storage import manifest_json, names
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.object_store import ObjectStore, put_over
from mpi_ckpt.storage.places import RemoteStep
from mpi_ckpt.storage.shard_line import shard_line


@dataclass
class Listed:
    """What lies below one step: whether it is committed, and the size of each of its shards, by key."""

    committed: bool = False
    shards: dict[str, int] = field(default_factory=dict)


def list_remote(store: ObjectStore, step: int | None = None) -> dict[int, Listed]:
    """**Local.** All that is ours in the store (or of one step), by step in ascending order. Raises RemoteFailed."""
    found: defaultdict[int, Listed] = defaultdict(Listed)
    for key, nbytes in store.list("" if step is None else names.step_name(step)).items():
        directory, _, rest = key.partition("/")
        number, parts = names.parse_step(directory), rest.split("/")
        if number is None:
            continue
        if rest == names.UPLOAD_MANIFEST:
            found[number].committed = True
        elif len(parts) == 2 and names.is_save_id(parts[0]) and names.parse_shard(parts[1]) is not None:
            found[number].shards[key] = nbytes
    return dict(sorted(found.items()))


def committed_remotely(store: ObjectStore) -> list[int]:
    """**Local.** The remotely committed steps, in ascending order. Raises RemoteFailed."""
    return [step for step, listed in list_remote(store).items() if listed.committed]


def find_remote(store: ObjectStore, step: int | None) -> list[int]:
    """**Local.** The remotely committed steps, or `step` alone. Raises NoCheckpoint where it is not, RemoteFailed."""
    committed = committed_remotely(store)
    if not committed or (step is not None and step not in committed):
        raise _nothing(store, step, committed)
    return committed if step is None else [step]


def remote_manifest(store: ObjectStore, step: int) -> ShardManifest:
    """**Local.** A step's upload manifest. Raises NoCheckpoint, InvalidManifest, RemoteFailed."""
    manifest = read_upload_manifest(store, step)
    if manifest is None:
        raise _nothing(store, step, committed_remotely(store))
    return manifest


def read_upload_manifest(store: ObjectStore, step: int) -> ShardManifest | None:
    """**Local.** What a step consists of; None where it is not remotely committed. InvalidManifest, RemoteFailed."""
    found = store.get(_key(step))
    return None if found is None else _parse(store, step, found[0])


def remote_step(store: ObjectStore, manifest: ShardManifest) -> RemoteStep:
    """The place of the shards of a manifest's save."""
    return RemoteStep(store.url, manifest.step, manifest.save_id)


def write_upload_manifest(
    store: ObjectStore, manifest: ShardManifest, check_ours: Callable[[], None] = lambda: None
) -> None:
    """**Local.** Commit a step whose shards are all there, and read it back. Raises MissingShard, RemoteFailed.

    `check_ours` raises where the place is not the caller's any more.
    """
    key = _key(manifest.step)
    # Seen before anything is checked, and replaced only as it was seen: what a successor puts there after the checks,
    # however long the requests take, stays.
    held = store.get(key)
    check_ours()
    _check_complete(store, manifest)
    put_over(store, key, held, _text(store, manifest).encode(), f"that of save {manifest.save_id}")
    _check_complete(store, manifest)  # before it had a manifest the step looked left over, to a launch that tidies up


def _check_complete(store: ObjectStore, manifest: ShardManifest) -> None:
    listed = list_remote(store, manifest.step).get(manifest.step)
    place = remote_step(store, manifest)
    for shard in manifest.shards:
        file = place / shard.path
        nbytes = listed.shards.get(file.key) if listed else None
        if nbytes != shard.nbytes:
            raise MissingShard(
                "a shard that was uploaded is not in the store",
                path=file,
                rank=shard.rank,
                found="no object" if nbytes is None else f"{nbytes} bytes",
                expected=f"{shard.nbytes} bytes",
                action="See whether something else deletes from there. A directory has to be the same on all nodes.",
            )


def retire(store: ObjectStore, step: int, listed: Listed) -> None:
    """**Local.** Delete a step: its manifest first, then its shards. Raises RemoteFailed."""
    if listed.committed:
        store.delete([_key(step)])
    store.delete([*listed.shards])


def is_uploaded(store: ObjectStore, manifest: ShardManifest) -> bool:
    """**Local.** Whether this very save is remotely committed. Raises RemoteFailed."""
    try:
        found = read_upload_manifest(store, manifest.step)
    except InvalidManifest:  # put another in its place
        return False
    return found is not None and found.save_id == manifest.save_id


def _nothing(store: ObjectStore, step: int | None, committed: list[int]) -> NoCheckpoint:
    return NoCheckpoint(
        "there is no step in the remote tier" if step is None else f"step {step} is not in the remote tier",
        path=store.url,
        found=f"steps {', '.join(map(str, committed[-12:]))}" if committed else "no upload_manifest.json",
        expected="a step that was uploaded" if step is None else f"step {step}",
        action=f"Look with `python -m mpi_ckpt ls --remote {store.url}`."
        if committed
        else "Name the --remote of the training command; or upload a step with "
        f"`python -m mpi_ckpt push RUN_DIR --remote {store.url}`.",
    )


def _key(step: int) -> str:
    return f"{names.step_name(step)}/{names.UPLOAD_MANIFEST}"


def _text(store: ObjectStore, manifest: ShardManifest) -> str:
    """The local manifest's content, and the keys of the shards in the order of the ranks."""
    document = manifest_json.load(manifest.to_json())
    del document["shards"]
    place = remote_step(store, manifest)
    document["remote_paths"] = [(place / shard.path).key for shard in manifest.shards]
    return manifest_json.dump(document, {"shards": map(shard_line, manifest.shards)})


def _parse(store: ObjectStore, step: int, data: bytes) -> ShardManifest:
    path = f"{store.url}/{_key(step)}"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidManifest("the manifest is not UTF-8", path=path, found=error, expected="strict JSON") from None
    manifest = ShardManifest.from_json(text, path)
    place = remote_step(store, manifest)
    expected = [(place / shard.path).key for shard in manifest.shards]
    found = manifest_json.load(text, path).get("remote_paths")
    if manifest.step != step or found != expected:
        raise InvalidManifest(
            "the upload manifest does not speak of its own step",
            path=path,
            found=f"step {manifest.step}, remote_paths {str(found)[:200]}",
            expected=f"step {step}, remote_paths {str(expected)[:200]}",
            action="Restore another step, or push this one again.",
        )
    return manifest
