"""A run whose output_dir is a URL: uploads of its local folder, and downloads for a resume.

A checkpoint's manifest is emptied before changes, and uploaded last. Neither listings nor times are trusted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import threading
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from littrainer.checkpoint.atomic_write import RANK_SUFFIX, STAGING_DIR, delete_folder, remove_if_empty
from littrainer.checkpoint.checksums import MANIFEST_NAME, DamagedManifest, Manifest, file_record, parse_manifest
from littrainer.checkpoint.layout import TRAINER_STATE_NAME, checkpoint_step, list_checkpoints, make_output_dir
from littrainer.checkpoint.verification import find_damage, find_edits, read_manifest_or_empty
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.remote_folder import MAX_TRIES, RemoteFolder, RemoteFolderError, get_remote_url, is_inside

logger = logging.getLogger(__name__)

# At the URL: the run that uploads, and its complete checkpoints, which a listing may miss.
MARKER_NAME = ".littrainer_running.json"
# Checks the permission to delete.
PROBE_NAME = ".littrainer_probe"
# In the local folder, by URL: CRC-32 of the manifests last at the URL.
UPLOADED_MANIFESTS_NAME = ".littrainer_uploaded.json"
# In the local folder, by URL: size and time of uploaded files outside of checkpoints.
UPLOADED_FILES_NAME = ".littrainer_sent.json"
MESSAGE_INTERVAL_S = 30.0
# A manifest at the URL during the upload or deletion of its checkpoint.
INCOMPLETE = b""


def _highest_first(paths: Iterable[object]) -> list[str]:
    steps = {Path(str(path)).name: checkpoint_step(str(path)) for path in paths}
    return sorted((name for name, step in steps.items() if step is not None), key=lambda name: -(steps[name] or 0))


class RemoteRun:
    """A run at a URL and the local folder that mirrors it.

    Attributes:
        hang_timeout: seconds without progress; 0 for no limit.
        manifests: contents of the manifests at the URL, by checkpoint.
        foreign: checkpoints at the URL without a manifest.
        deleted: local checkpoints that were deleted at the URL.
        earlier: local manifests from before this training, whose checkpoints stay at the URL.
        deferred: paths of local checkpoints whose deletion waits for an upload.
        rotated: checkpoints that this training deletes locally and at the URL.
    """

    def __init__(self, folder: Path, hang_timeout: float = 0) -> None:
        make_output_dir(str(folder))
        self.folder, self.remote = folder, RemoteFolder(str(get_remote_url(folder)))
        self.manifests: dict[str, bytes] = {}
        self.foreign, self.deleted, self.deferred, self.rotated, self._warned = (set[str]() for _ in range(5))
        # Checkpoint -> files uploaded before its manifest; files that the manifest lacks, since the checkpoint
        # was thinned meanwhile, are deleted after its upload.
        self._partial_uploads: dict[str, set[str]] = {}
        self.earlier: dict[str, bytes | None] = {}
        self._uploaded = _parse_json_object(_read_bytes(folder / UPLOADED_MANIFESTS_NAME), self.remote.url)
        self._identity = {"run": uuid.uuid4().hex, "holder": f"process {os.getpid()} on {socket.gethostname()}"}
        self.hang_timeout, self._is_requested = hang_timeout, False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def local_checkpoints(self) -> list[str]:
        return [path.name for path in list_checkpoints(self.folder)]

    def scan(self) -> None:
        listed = _highest_first(self.remote.list_names())
        marked = _parse_json_object(self.remote.read(MARKER_NAME)).get("checkpoints")
        for name in _highest_first([*listed, *(marked if isinstance(marked, list) else ()), *self.local_checkpoints()]):
            # Read twice if missing, since a missing checkpoint is deleted locally.
            content = self.remote.read(f"{name}/{MANIFEST_NAME}") or self.remote.read(f"{name}/{MANIFEST_NAME}")
            if content == INCOMPLETE or _parse_or_none(content) is not None:
                self.manifests[name] = content or INCOMPLETE
            elif content is not None:
                logger.warning("%s/%s does not count: its %s is torn.", self.remote.url, name, MANIFEST_NAME)
            elif name in listed:
                self.foreign.add(name)
            elif self._was_uploaded(name, self.read_local_manifest(name)):
                self.deleted.add(name)

    def read_local_manifest(self, name: str) -> bytes | None:
        return _read_bytes(self.folder / name / MANIFEST_NAME)

    def is_current(self, name: str, content: bytes) -> bool:
        """Return whether the local checkpoint equals the URL's or is newer."""
        local = self.read_local_manifest(name)
        return local == content or (local is not None and self._was_uploaded(name, content))

    def _was_uploaded(self, name: str, manifest: bytes | None) -> bool:
        """Look up the recorded uploads and downloads."""
        return manifest is not None and self._uploaded.get(name) == zlib.crc32(manifest)

    def _move_local_aside(self, name: str) -> None:
        """Rename a local checkpoint; delete it if it was uploaded and the URL has a complete checkpoint."""
        manifest, local = self.read_local_manifest(name), self.folder / name
        if not local.is_dir():
            return
        was_uploaded = self._was_uploaded(name, manifest)
        aside = f".deleted-{name}" if was_uploaded else f".never-uploaded-{name}-{zlib.crc32(manifest or b''):08x}"
        delete_folder(self.folder / aside)
        local.rename(self.folder / aside)
        if not was_uploaded:
            logger.warning("%s is now %s: %s has another checkpoint of that name.", local, aside, self.remote.url)
        elif any(self.manifests.values()):
            delete_folder(self.folder / aside)

    def download(self, name: str) -> bool:
        """Download a checkpoint unless the local copy is current; return whether it is intact."""
        local, content = self.folder / name, self.remote.read(f"{name}/{MANIFEST_NAME}")
        manifest = _parse_or_none(content)
        if (content is None or manifest is None or self.is_current(name, content)) and not find_damage(local):
            return True
        # Another run uploads or deletes the checkpoint.
        if manifest is None and content is not None:
            return False
        staging = self.folder / STAGING_DIR / f"{name}{RANK_SUFFIX}{os.getpid()}"
        logger.info("Downloading %s/%s to %s", self.remote.url, name, local)
        try:
            # A killed process may have had this pid.
            delete_folder(staging)
            if content is not None and manifest is not None:
                self._download_with_retry(name, content, manifest, staging)
            elif not self._download_without_manifest(name, staging):
                return False
            # Another process of this machine may have downloaded the checkpoint too.
            with contextlib.suppress(OSError):
                self._move_local_aside(name)
                staging.rename(local)
            if not local.is_dir() or self.read_local_manifest(name) != content:
                raise RemoteFolderError(f"{self.remote.url}/{name} was downloaded, and {local} cannot be replaced.")
            self._record_uploads(name)
            return True
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            remove_if_empty(staging.parent)

    def _download_with_retry(self, name: str, content: bytes, manifest: Manifest, staging: Path) -> None:
        self.manifests[name] = content
        staging.mkdir(parents=True)
        (staging / MANIFEST_NAME).write_bytes(content)
        for _ in range(MAX_TRIES):
            for file, record in manifest.files.items():
                if not (staging / file).is_file() or file_record(staging / file) != record:
                    self.remote.download(f"{name}/{file}", staging / file)
            if not (damage := find_damage(staging)) and not find_edits(staging):
                return
        if damage:
            raise RemoteFolderError(
                f"{self.remote.url}/{name} was downloaded {MAX_TRIES} times and is damaged: {' '.join(damage)} Try "
                "again later, delete it there, or give the URL of another checkpoint."
            )

    def _download_without_manifest(self, name: str, staging: Path) -> bool:
        damage = [f"{file} would be outside of it." for file in self.remote.download_all(name, staging)]
        # Files of littrainer without a manifest are an incomplete checkpoint.
        if not staging.is_dir() or any(staging.glob("littrainer_*")):
            return False
        if damage := damage or find_damage(staging):
            logger.warning("Skipping %s/%s, which is damaged: %s", self.remote.url, name, " ".join(damage))
        return not damage

    def claim(self) -> None:
        """Register as the run that uploads to the URL, and synchronize the local folder.

        A checkpoint only at the URL gets a local folder with its manifest, so that rotation counts it. A checkpoint
        deleted at the URL is deleted or renamed locally.
        """
        if (marker := self.remote.read(MARKER_NAME)) is None:
            # The URL was emptied: upload all files again.
            (self.folder / UPLOADED_FILES_NAME).unlink(missing_ok=True)
        if holder := _parse_json_object(marker).get("holder"):
            logger.warning("%s is taken over from %s, which did not release it.", self.remote.url, holder)
        self.scan()
        for name in self.deleted:
            logger.warning("%s/%s was deleted, so it is removed from %s too.", self.remote.url, name, self.folder)
            self._move_local_aside(name)
        if self.foreign:
            effect = "They are never deleted, and a new checkpoint of the same name replaces their files"
            logger.warning("%s: no manifest in %s. %s.", self.remote.url, ", ".join(sorted(self.foreign)), effect)
        for name, content in self.manifests.items():
            if content and not self.is_current(name, content):
                self._move_local_aside(name)
                (self.folder / name).mkdir()
                write_atomically(self.folder / name / MANIFEST_NAME, content)
        self._write_marker()
        self._refuse_second_run()

    def release(self) -> None:
        """Unregister from the URL, unless an upload hangs; errors are ignored."""
        if self._thread is None or not self._thread.is_alive():
            with contextlib.suppress(RemoteFolderError, OSError):
                self._refuse_second_run()
                self._identity["holder"] = ""
                self._write_marker()

    def start(self) -> threading.Thread:
        """Upload changes in a thread, after a running upload."""
        self._is_requested = True
        if self.earlier and self._thread is None:
            text = "%s has %s of an earlier run, kept until overwritten. A resume takes the highest step of all."
            logger.warning(text, self.remote.url, ", ".join(self.earlier))
        if self._thread is None or not self._thread.is_alive():
            # A hanging upload must not keep the process alive.
            self._thread = threading.Thread(target=self._upload_until_done, name="littrainer uploads", daemon=True)
            self._thread.start()
        return self._thread

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def finish(self) -> None:
        """Upload all changes and wait; raise a RemoteFolderError after two failures or a hang."""
        seconds = self.hang_timeout or MESSAGE_INTERVAL_S
        for _ in range(2):
            thread, written = self.start(), -1
            while thread.is_alive() and not (self.hang_timeout and written == RemoteFolder.written):
                written = RemoteFolder.written
                thread.join(seconds)
                if thread.is_alive():
                    logger.warning("Waiting for the upload of %s to %s.", self.folder, self.remote.url)
            if thread.is_alive():
                self._error = TimeoutError(f"No object was uploaded for {seconds:g} s (hang_timeout).")
            # If the thread was ending when `start` requested an upload, the next round uploads.
            elif self._error is None and not self._is_requested:
                return
        raise RemoteFolderError(
            f"{self._error} Not all of this run is at {self.remote.url}. All of it is in {self.folder}, and the "
            "next training on this machine with the same output_dir uploads it."
        ) from self._error

    def _upload_until_done(self) -> None:
        while self._is_requested:
            self._is_requested, self._error = False, None
            try:
                self._upload_all()
            except BaseException as error:
                self._error = error
                logger.warning("%s The upload is retried at the next save, or at the end of training.", error)

    def _upload_all(self) -> None:
        self._refuse_second_run()
        while (name := self._next_to_upload()) is not None:
            # Rotation may delete the checkpoint meanwhile.
            with contextlib.suppress(FileNotFoundError):
                self._upload(name)
        upload_files(self.folder, self._write)
        # Older checkpoints are deleted only after the newest is complete.
        local = self.local_checkpoints()
        older = {name for name, content in self.manifests.items() if not content or name in self.rotated}
        older = older.difference(self.earlier, local)
        if not older or not local or not self.manifests.get(local[0]):
            return
        effect = "So older checkpoints stay there."
        try:
            self.remote.write(PROBE_NAME, b"")
            self.remote.delete(PROBE_NAME, is_folder=True)
            effect = "The deletion is retried at the next save, or by the next training there."
            for name in older:
                self.manifests[name] = INCOMPLETE
                self._write(f"{name}/{MANIFEST_NAME}", INCOMPLETE)
                self.remote.delete(name, is_folder=True)
                del self.manifests[name]
                self._write_marker()
        except RemoteFolderError as error:
            self._warn_once(f"{error} {effect}")

    def should_defer_deletion(self, path: str) -> bool:
        """Return whether a deletion must wait for an upload, and record it."""
        must_stay = self.keep_or_rotate(path)
        (self.deferred.add if must_stay else self.deferred.discard)(path)
        return must_stay

    def on_resume(self, name: str) -> None:
        """Allow deletion of earlier checkpoints at the URL after a resume from one of them."""
        if self.earlier.get(name) == self.read_local_manifest(name):
            self.earlier.clear()

    def keep_or_rotate(self, path: str) -> bool:
        """Return True if this checkpoint or a newer checkpoint has to be uploaded first; else mark this as rotated."""
        name, local = Path(path).name, self.local_checkpoints() if Path(path).parent == self.folder else []
        # Newer checkpoints at the URL may no longer exist locally.
        names = _highest_first([*local, *(self.manifests.keys() - self.earlier.keys())])
        must_stay = name in local and not any(map(self._is_uploaded, names[: names.index(name) + 1]))
        if not must_stay and name in local:
            self.rotated.add(name)
        return must_stay

    def _is_uploaded(self, name: str) -> bool:
        content = self.manifests.get(name)
        return bool(content) and self.read_local_manifest(name) in (content, None)

    def _next_to_upload(self) -> str | None:
        for name in self.local_checkpoints():
            if (path := str(self.folder / name)) in self.deferred and not self.keep_or_rotate(path):
                continue
            if self._is_uploaded(name) or not (content := self.read_local_manifest(name)):
                continue
            manifest, damage = _parse_or_none(content), " ".join(find_damage(self.folder / name))
            if manifest and not damage and all((self.folder / name / file).is_file() for file in manifest.files):
                return name
            # A changed manifest: the checkpoint was thinned or deleted meanwhile.
            if self.read_local_manifest(name) == content:
                self._warn_once(f"{self.folder / name} is damaged, and not uploaded to {self.remote.url}. {damage}")
        return None

    def _upload(self, name: str) -> None:
        content = (self.folder / name / MANIFEST_NAME).read_bytes()
        now, before = parse_manifest(content).files, _parse_or_none(self.manifests.get(name))
        uploaded = {} if before is None else before.files
        if self.earlier.get(name, content) != content:
            # Replaced rather than changed, since another thread may iterate over the dict.
            self.earlier = {other: manifest for other, manifest in self.earlier.items() if other != name}
        if changed := [file for file in now if uploaded.get(file) != now[file]]:
            self.manifests[name] = INCOMPLETE
            self._write(f"{name}/{MANIFEST_NAME}", INCOMPLETE)
            self._partial_uploads.setdefault(name, set()).update(uploaded, changed)
        try:
            for file in changed:
                self._write(f"{name}/{file}", self.folder / name / file)
        except RemoteFolderError:
            if self.read_local_manifest(name) == content:
                raise
        if self.read_local_manifest(name) != content or find_damage(self.folder / name):
            return
        self._write(f"{name}/{MANIFEST_NAME}", content)
        for file in (self._partial_uploads.pop(name, set()) | uploaded.keys()) - now.keys():
            self.remote.delete(f"{name}/{file}")
        self.manifests[name] = content
        self.rotated.discard(name)
        self._write_marker()
        logger.info("Uploaded %s to %s", self.folder / name, self.remote.url)

    def _write(self, name: str, content: bytes | Path) -> None:
        """Upload an object, unless another run has taken over."""
        self._refuse_second_run()
        self.remote.write(name, content)

    def _refuse_second_run(self) -> None:
        marker = _parse_json_object(self.remote.read(MARKER_NAME))
        if marker.get("run", self._identity["run"]) != self._identity["run"]:
            raise RemoteFolderError(
                f"{self.remote.url}/{MARKER_NAME} says that another run, {marker.get('holder')}, began to upload "
                "there. Two runs there would delete each other's checkpoints, so this one uploads nothing more."
            )

    def _write_marker(self) -> None:
        marker = {**self._identity, "checkpoints": _highest_first(self.manifests)}
        self.remote.write(MARKER_NAME, json.dumps(marker, indent=1).encode())
        self._record_uploads()

    def _record_uploads(self, *names: str) -> None:
        """Record manifests at the URL as uploaded or downloaded."""
        contents = {name: self.manifests.get(name) for name in names or self.manifests}
        self._uploaded |= {name: zlib.crc32(content) for name, content in contents.items() if content}
        write_atomically(self.folder / UPLOADED_MANIFESTS_NAME, json.dumps({self.remote.url: self._uploaded}, indent=1))


def _read_bytes(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None


def _parse_or_none(content: bytes | None) -> Manifest | None:
    """Return None for a manifest that is missing, torn or names files outside of the checkpoint."""
    try:
        manifest = parse_manifest(content or b"")
    except DamagedManifest:
        return None
    return manifest if all(map(is_inside, manifest.files)) else None


def _parse_json_object(content: bytes | None, url: str | None = None) -> dict[str, Any]:
    """Return an object or its entry for a URL; empty if missing or torn."""
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
        fields = json.loads(content or b"{}")
        fields = fields if url is None else fields[url]
        return fields if isinstance(fields, dict) else {}
    return {}


# ---- Functions for scripts, resumes and reports ----------------------------------------------------------------------


def upload_files(folder: Path | str, write: Callable[[str, Path], None] | None = None) -> None:
    """Upload changed files of a folder that mirrors a URL, except checkpoints and other runs."""
    if (url := get_remote_url(folder)) is None:
        return
    write, sent = (
        write or RemoteFolder(url).write,
        _parse_json_object(_read_bytes(Path(folder, UPLOADED_FILES_NAME)), url),
    )
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and checkpoint_step(name) is None]
        # A nested run uploads its own folder, so its URL may be newer than the folder.
        if Path(parent) != Path(folder) and not {UPLOADED_MANIFESTS_NAME, UPLOADED_FILES_NAME}.isdisjoint(names):
            folders[:], names[:] = [], []
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            # A callback may delete a file meanwhile.
            with contextlib.suppress(FileNotFoundError):
                name, stamp = path.relative_to(folder).as_posix(), [path.stat().st_size, path.stat().st_mtime_ns]
                if sent.get(name) != stamp:
                    write(name, path)
                    sent[name] = stamp
                    write_atomically(Path(folder, UPLOADED_FILES_NAME), json.dumps({url: sent}))


def download_newest(folder: Path | str, without: Collection[str] = ()) -> set[str]:
    """Download a URL's newest checkpoint, and the best that it names, to the folder that mirrors the URL.

    Return the local checkpoints that were deleted at the URL.
    """
    run = RemoteRun(Path(folder))
    run.scan()
    names = {*run.manifests, *run.foreign, *run.local_checkpoints()}.difference(run.deleted, without)
    for name in _highest_first(names):
        content = run.manifests.get(name) or INCOMPLETE
        manifest = (None if run.is_current(name, content) else _parse_or_none(content)) or read_manifest_or_empty(
            run.folder / name
        )
        if not manifest.is_thinned and manifest.weights_are_finite is not False and run.download(name):
            state = _parse_json_object(_read_bytes(run.folder / name / TRAINER_STATE_NAME))
            if (best := Path(str(state.get("best_model_checkpoint") or "")).name) in run.manifests:
                run.download(best)
            break
    return run.deleted


def download_checkpoint(folder: Path) -> None:
    RemoteRun(folder.parent).download(folder.name)


def download_small_files(folder: Path, names: Collection[str]) -> Path:
    """Download a run's small files to a separate folder."""
    run = RemoteRun(folder)
    run.scan()
    complete = [name for name, content in run.manifests.items() if content]
    shutil.rmtree(target := folder / ".report" / folder.name, ignore_errors=True)
    for prefix in ["", *(f"{name}/" for name in _highest_first(complete)[:1])]:
        for name in names:
            run.remote.download(f"{prefix}{name}", target / prefix / name)
    return target
