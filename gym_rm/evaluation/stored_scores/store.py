"""A file with scores, so that a run that was stopped can be resumed, and repeated without the model."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gym_rm.documents import parse_json
from gym_rm.errors import ConfigError, warn_once


class ScoreStore:
    """JSON Lines with scores: a header that says how they were made, then an entry for each row, which is only added.

    A row is found again by a digest of its text: rows of the input may move, and a changed row has no score. Of several
    entries of a row, the last one counts. An incomplete last line, of a run that was killed, is removed.

    Args:
        path: the file, which may be missing; None to keep the scores in memory only.

    Attributes:
        header: the first line; None for a new store.
        entries: the entries by the digest of their row.

    Raises:
        ConfigError: the file cannot be read, or is not such a file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.header: dict[str, Any] | None = None
        self.entries: dict[str, dict[str, Any]] = {}
        self._file: IO[bytes] | None = None
        self._size = 0  # of the whole lines, in bytes
        if path is not None and os.path.exists(path):
            self._read(path)

    @classmethod
    def read(cls, path: Path) -> ScoreStore:
        """Read a file of scores.

        Raises:
            ConfigError: the file is missing, cannot be read, or is not such a file.
        """
        store = cls(path)
        if store.header is None:
            raise ConfigError(f"cannot read the scores in {str(path)!r}: the file is missing or empty.")
        return store

    def lock(self) -> None:
        """Open the file to add entries; no other process can until it is closed.

        Raises:
            ConfigError: another process has the lock, or the file cannot be written.
        """
        if self.path is None or self._file is not None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(
                f"another process is writing {str(self.path)!r}; wait until it has finished, stop it, or choose "
                "another output."
            ) from error
        except OSError as error:
            if self._file is None:
                raise ConfigError(f"cannot write {str(self.path)!r}: {error.strerror}.") from error
            warn_once(f"{str(self.path)!r} cannot be locked ({error.strerror}): do not write it with two commands.")
        self._file.truncate(self._size)

    def differences(self, settings: Mapping[str, Any], identity: Mapping[str, Any] | None = None) -> str:
        """Return what made the stored scores other than these settings and this model; empty if nothing did.

        Args:
            settings: plain values that affect the scores; the header has them as `settings`.
            identity: plain values of `Provenance.identity`; None if the model is not loaded yet.

        Raises:
            ConfigError: the header has no settings.
        """
        stored = self.header or {}
        if not isinstance(stored.get("settings"), dict) or not isinstance(stored.get("identity") or {}, dict):
            raise ConfigError(
                f"{str(self.path)!r} is not a file of scores as gym-rm writes them: its first line has no settings. "
                "Choose another output, or start again with --overwrite."
            )
        found = _differences(stored["settings"], settings)
        if identity is not None and stored.get("identity") is not None:
            found += _differences(stored["identity"], identity)
        return "; ".join(found)

    def start(self, header: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Replace everything by a header and these entries."""
        self.header, self.entries = dict(header), {}
        self.lock()
        if self._file is not None:
            self._file.truncate(0)
            self._file.write(_line(self.header))
            self._file.flush()
        self.add(entries or {})

    def add(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Append entries by the digests of their rows, in one write."""
        self.entries.update({digest: dict(entry) for digest, entry in entries.items()})
        if self._file is not None:
            self._file.write(b"".join(_line({"digest": digest, **entry}) for digest, entry in entries.items()))
            self._file.flush()

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        break
                    entry = parse_json(line)
                    if number == 1:
                        self.header = {**entry}
                    else:
                        self.entries[entry.pop("digest")] = entry
                    self._size += len(line)
        except OSError as error:
            raise ConfigError(f"cannot read the scores in {str(path)!r}: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{str(path)!r} line {number} is not a line of scores as gym-rm writes them: {error!r}."
            ) from error


def digest_of_text(text: bytes) -> str:
    """Return the name of a row in a store: 24 hex digits of the SHA-256 of its text."""
    return hashlib.sha256(text).hexdigest()[:24]


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    return [f"{name}: earlier {theirs.get(name)!r}, now {ours.get(name)!r}" for name in names]


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"
