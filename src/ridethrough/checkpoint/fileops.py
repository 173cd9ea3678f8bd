"""Every file operation of a save, one function each, so that a test can stop the process at any of them.

`set_hook` installs a callable that is called with (operation, path) before each operation; what it raises is
met as if the operating system had said it. The keeper installs the one named by
`RIDETHROUGH_FILE_HOOK=module:function`. Used by the keeper's writer threads. Knows nothing of torch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from ridethrough.checkpoint.layout import digest

Hook = Callable[[str, str], None]
CHUNK_BYTES = 16 << 20  # unit of hashing and of one write; a multiple of any block size
DIRECT_FROM_BYTES = 32 << 20  # smaller files gain nothing from O_DIRECT
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}
_hook: Hook | None = None
_said: set[str] = set()


def set_hook(hook: Hook | None) -> None:
    global _hook
    _hook = hook


def hook_from_environment(variable: str) -> None:
    """Install the hook that this variable names, if it names one: RIDETHROUGH_FILE_HOOK for the keeper,
    RIDETHROUGH_LOAD_HOOK for the workers, which read."""
    hook = os.environ.get(variable)
    if hook:
        module, _, name = hook.partition(":")
        set_hook(getattr(import_module(module), name))


def reading(operation: str, path: str | Path) -> None:
    """Called before a load touches storage."""
    _before(operation, path)


def _before(operation: str, path: str | Path) -> None:
    if _hook is not None:
        _hook(operation, str(path))


def unsupported_seen() -> list[str]:
    """Operations that a file system of this process refused as unsupported (an object-store mount's fsync,
    say)."""
    return sorted(_said)


def make_folder(path: Path) -> None:
    """mkdir 0700 (parents are the user's); an existing folder is fine, its fellow ranks make it too."""
    _before("mkdir", path)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that the names in it survive a power cut."""
    _before("fsync_folder", path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        _tolerate("fsync of a folder", error)


def _sync(fd: int, path: Path) -> None:
    _before("fsync", path)
    try:
        os.fsync(fd)
    except OSError as error:
        _tolerate("fsync", error)


def _tolerate(what: str, error: OSError) -> None:
    """A file system that has no such call at all is not an error of this write; anything else is."""
    if error.errno not in _UNSUPPORTED:
        raise error
    _said.add(what)


def write_small(path: Path, data: bytes) -> None:
    """Create `path` exclusively with `data`, 0600, and fsync it. Raises FileExistsError and any OSError."""
    _before("create", path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _before("write", path)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        _sync(fd, path)
    finally:
        os.close(fd)


def unlink(path: Path) -> None:
    _before("unlink", path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def remove_folder(path: Path) -> None:
    _before("rmdir", path)
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def write_data(path: Path, data: memoryview, threads: int, stop: Callable[[], bool]) -> list[str]:
    """Write `data` to a new file `path` (0600), fsynced; returns the xxh3-128 of each CHUNK_BYTES of it.

    The space is allocated first, so that a full disk is met before a byte is written. Large files go by
    O_DIRECT where the file system takes it (`data` then starts on a page and is a whole number of them).
    `stop` is asked between chunks; when it says so, InterruptedError is raised. A partial file of a keeper
    that died is replaced: its attempt was never committed.
    """
    unlink(path)
    _before("create", path)
    direct = len(data) >= DIRECT_FROM_BYTES and len(data) % 4096 == 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    fd = os.open(path, flags, 0o600)
    try:
        _allocate(fd, path, len(data))
        fd_direct = _open_direct(path) if direct else None
        try:
            hashes = _write_chunks(fd, fd_direct, path, data, threads, stop)
        finally:
            if fd_direct is not None:
                os.close(fd_direct)
        _sync(fd, path)
    finally:
        os.close(fd)
    return hashes


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def _allocate(fd: int, path: Path, size: int) -> None:
    _before("allocate", path)
    if size == 0:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _write_chunks(
    fd: int, fd_direct: int | None, path: Path, data: memoryview, threads: int, stop: Callable[[], bool]
) -> list[str]:
    starts = range(0, len(data), CHUNK_BYTES)
    direct_works = [fd_direct is not None]

    def one(start: int) -> str:
        if stop():
            raise InterruptedError(errno.EINTR, "save given up", str(path))
        chunk = data[start : start + CHUNK_BYTES]
        _before("write", path)
        done = 0
        while done < len(chunk):
            if direct_works[0] and fd_direct is not None and done % 4096 == 0:
                try:
                    done += os.pwrite(fd_direct, chunk[done:], start + done)
                    continue
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    direct_works[0] = False
            done += os.pwrite(fd, chunk[done:], start + done)
        return digest(chunk)

    if threads <= 1 or len(starts) <= 1:
        return [one(start) for start in starts]
    with ThreadPoolExecutor(threads, thread_name_prefix="rt-write") as pool:
        return list(pool.map(one, starts))
