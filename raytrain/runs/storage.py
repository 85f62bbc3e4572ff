"""File storage: one interface for a local directory and an object store, and large files that appear whole.

Everything that raytrain writes to a run, a checkpoint or an output folder goes through `Storage`.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import os
import posixpath
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cluster.preflight import is_submitted
from raytrain.errors import InputError, RunError, first_line

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_VARIABLE = re.compile(r"(\\\$|\$(?:([A-Za-z_]\w*)|\{([^}]*)\}))", re.ASCII)
_NO_DIR_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})  # network file systems


@dataclass(frozen=True)
class Entry:
    """One name in a directory; `size` in bytes (0 for a directory)."""

    name: str
    is_dir: bool
    size: int


@dataclass(frozen=True)
class WriteAdvice:
    """What to change where a file cannot be written: on a full disk, and otherwise."""

    full: str
    other: str


SAVES = WriteAdvice(
    "make room, lower save.keep or point save.dir at a larger disk", "check that save.dir can be written"
)
ANSWERS = WriteAdvice("make room or point infer.output at a larger disk", "check that infer.output can be written")


@contextlib.contextmanager
def explained_writes(path: str, advice: WriteAdvice = SAVES) -> Iterator[None]:
    """Turns an OSError of a write to `path` into a RunError with the file, the free space and the key."""
    try:
        yield
    except OSError as error:
        # pyarrow loses the errno of some errors in C++; their cause is only in the message.
        full = error.errno in _DISK_FULL or "No space left" in str(error)
        remedy, free = advice.full if full else advice.other, ""
        if full:
            place = next(folder for folder in Path(path).parents if folder.exists())  # at last / or .
            known = f"{shutil.disk_usage(place).free / 2**20:.1f} MiB"
            free = f", {'an unknown number of bytes' if '://' in path else known} free there"
        raise RunError(f"{path}: cannot be written: {error.strerror or error}{free}; {remedy}") from error


def join(place: str, name: str) -> str:
    """Path or URI of `name` below a path or URI; a URI's query (``?endpoint_override=...``) stays at its end."""
    base, mark, query = place.partition("?") if "://" in place else (place, "", "")
    return f"{base.rstrip('/')}/{name}{mark}{query}" if name else place


def split(path: str) -> tuple[str, str]:
    """(folder, last name) of a path or URI, so that `join` of both is the path; "." for a bare name."""
    base, mark, query = path.partition("?") if "://" in path else (path, "", "")
    folder, _, name = base.rstrip("/").rpartition("/")
    return f"{folder or ('/' if base.startswith('/') else '.')}{mark}{query}", name


def part_below(place: str, path: str) -> str | None:
    """The name for which `join(place, name)` is `path`; None if `path` is not below `place`."""
    base, mark, query = place.partition("?") if "://" in place else (place, "", "")
    inner = path.removesuffix(f"{mark}{query}") if mark else path
    return inner[len(base.rstrip("/")) + 1 :] if inner.startswith(f"{base.rstrip('/')}/") else None


class LocalStore:
    """A directory of a local or shared file system: a tree of files below `uri`; every name is relative to it, with
    forward slashes.

    Reading methods raise FileNotFoundError (OSError), writing methods RunError.
    """

    is_local = True

    def __init__(self, root: str, advice: WriteAdvice = SAVES) -> None:
        self.advice = advice
        self.uri = os.path.abspath(os.path.expanduser(root))

    def at(self, name: str) -> str:
        return os.path.join(self.uri, name) if name else self.uri

    def read_bytes(self, name: str) -> bytes:
        return Path(self.at(name)).read_bytes()

    def read_head(self, name: str, size: int) -> bytes:
        """The first `size` bytes, or fewer."""
        with open(self.at(name), "rb") as file:
            return file.read(size)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes a file atomically: readers see the old content or the new, even after a power loss."""
        with self.whole_file(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def whole_file(self, name: str, *, buffering: int = -1) -> Iterator[BinaryIO]:
        """Opens a new file that is written piece by piece and has its name, with all of its content, once the block
        ends; it is deleted if the block raises."""
        folder, last = os.path.split(self.at(name))
        temporary = os.path.join(folder, f".{last}.{secrets.token_hex(4)}.tmp")
        try:
            with explained_writes(self.at(name), self.advice):
                os.makedirs(folder, exist_ok=True)
                with open(temporary, "wb", buffering) as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.at(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Creates a file; False if `name` exists. Name and content appear together (a hard link of a complete file)."""
        path = self.at(name)
        temporary = f"{path}.{secrets.token_hex(4)}.tmp"
        with explained_writes(path, self.advice):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                Path(temporary).write_bytes(data)
                os.link(temporary, path)
            except FileExistsError:
                return False
            except PermissionError:  # a file system without hard links
                try:
                    with open(path, "xb") as file:
                        file.write(data)
                except FileExistsError:
                    return False
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
        return True

    @contextlib.contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        """Opens a new unbuffered file; it is on disk (fsync) when the block ends."""
        path = self.at(name)
        with explained_writes(path, self.advice):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb", buffering=0) as file:
                yield file
                os.fsync(file.fileno())

    def local_copy(self, name: str, scratch: str) -> str:
        return self.at(name)

    def exists(self, name: str) -> bool:
        return os.path.exists(self.at(name))

    def entries(self, name: str) -> list[Entry]:
        """The entries in sorted order; empty if the directory does not exist. Files deleted meanwhile are left out."""
        rows = []
        try:
            with os.scandir(self.at(name)) as found:
                for entry in found:
                    with contextlib.suppress(FileNotFoundError):  # a temporary file that another process has deleted
                        size = 0 if entry.is_dir() else entry.stat(follow_symlinks=False).st_size
                        rows.append(Entry(entry.name, entry.is_dir(), size))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(rows, key=lambda row: row.name)

    def changed(self, name: str) -> float | None:
        """Time of the last change in unix seconds; None if it does not exist."""
        try:
            return os.stat(self.at(name)).st_mtime_ns / 1e9
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        with explained_writes(self.at(name), self.advice), contextlib.suppress(FileNotFoundError):
            os.unlink(self.at(name))

    def delete_tree(self, name: str) -> None:
        shutil.rmtree(self.at(name), ignore_errors=True)

    def make_dir(self, name: str) -> None:
        with explained_writes(self.at(name), self.advice):
            os.makedirs(self.at(name), exist_ok=True)

    def sync_dir(self, name: str) -> None:
        """Syncs a directory: new names in it survive a power loss only after this."""
        with explained_writes(self.at(name), self.advice):
            descriptor = os.open(self.at(name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as error:
                if error.errno not in _NO_DIR_SYNC:
                    raise
            finally:
                os.close(descriptor)


class ObjectStore:
    """Any location that a pyarrow filesystem supports, addressed by URI (s3, gs, hdfs, file); methods as `LocalStore`.

    Objects are written in one piece; nothing relies on rename or append. `file://` URIs use this class too.
    """

    is_local = False

    def __init__(self, uri: str, advice: WriteAdvice = SAVES) -> None:
        from pyarrow import fs

        self.advice = advice
        base, mark, query = uri.partition("?")
        self.uri = f"{base.rstrip('/')}{mark}{query}"
        self.fs, root = fs.FileSystem.from_uri(self.uri)
        self._root = root.rstrip("/")

    def at(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root

    def read_bytes(self, name: str) -> bytes:
        with self.fs.open_input_file(self.at(name)) as file:
            return file.read()

    def read_head(self, name: str, size: int) -> bytes:
        with self.fs.open_input_file(self.at(name)) as file:
            return file.read(size)

    def write_bytes(self, name: str, data: bytes) -> None:
        with self.open_write(name) as file:
            file.write(data)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Best effort: object stores have no exclusive creation, so the last writer wins a race."""
        if self.exists(name):
            return False
        self.write_bytes(name, data)
        return self.read_bytes(name) == data

    @contextlib.contextmanager
    def open_write(self, name: str) -> Iterator[Any]:
        with explained_writes(join(self.uri, name), self.advice):
            self.fs.create_dir(posixpath.dirname(self.at(name)), recursive=True)
            with self.fs.open_output_stream(self.at(name)) as file:
                yield file

    def local_copy(self, name: str, scratch: str) -> str:
        target = os.path.join(scratch, name.replace("/", "_"))
        with self.fs.open_input_stream(self.at(name)) as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, 16 * 2**20)
        return target

    def exists(self, name: str) -> bool:
        return bool(self.fs.get_file_info(self.at(name)).type)

    def entries(self, name: str) -> list[Entry]:
        from pyarrow import fs

        selector = fs.FileSelector(self.at(name), allow_not_found=True)
        try:
            found = self.fs.get_file_info(selector)
        except NotADirectoryError:
            return []
        rows = [Entry(info.base_name, info.type == fs.FileType.Directory, info.size or 0) for info in found]
        return sorted(rows, key=lambda entry: entry.name)

    def changed(self, name: str) -> float | None:
        info = self.fs.get_file_info(self.at(name))
        return info.mtime_ns / 1e9 if info.type and info.mtime_ns is not None else None

    def delete(self, name: str) -> None:
        with explained_writes(join(self.uri, name), self.advice), contextlib.suppress(FileNotFoundError):
            self.fs.delete_file(self.at(name))

    def delete_tree(self, name: str) -> None:
        with explained_writes(join(self.uri, name), self.advice), contextlib.suppress(FileNotFoundError):
            self.fs.delete_dir(self.at(name))

    def make_dir(self, name: str) -> None:
        with explained_writes(join(self.uri, name), self.advice):
            self.fs.create_dir(self.at(name), recursive=True)

    def sync_dir(self, name: str) -> None:
        """Does nothing: objects are durable once their stream is closed."""


Store = LocalStore | ObjectStore


def open_store(path: str, advice: WriteAdvice = SAVES) -> Store:
    """The store for a path or a URI, with the advice of its errors.

    Errors: pyarrow's ValueError or OSError for a URI that it does not support.
    """
    return ObjectStore(path, advice) if "://" in path else LocalStore(path, advice)


# -- single files named by a job: every failure is an InputError with the key that names the file -------


def typed_path(path: str, *, key: str) -> str:
    """A path or URI as a user types it, with `~`, `$NAME` and `${NAME}` expanded as in a shell; ``\\$`` is a dollar
    sign. Raises InputError if a variable is not set.

    The folders at its beginning that exist as they are written are left so, unless the path begins with a variable:
    folders may have such names, and a shell may have expanded the path already.
    """
    path = os.path.expanduser(path)
    if "$" not in path:
        return path
    head = path if path[0] != "$" else ""
    while head and not os.path.exists(head):
        head = head.rpartition("/")[0]
    rest = path[len(head) :]
    names = [short or long for whole, short, long in _VARIABLE.findall(rest) if whole != "\\$"]
    unset = [name for name in names if name not in os.environ]
    if unset:
        seen, where = f"{path}, whose variable {unset[0]} is not set", " on the cluster" if is_submitted() else ""
        remedy = f"set it{where}, or write the path out, a dollar sign as \\$"
        raise InputError(key, got=seen, expected="variables that are set", remedy=remedy)
    return head + _VARIABLE.sub(lambda match: os.environ[match[2] or match[3]] if match[1] != "\\$" else "$", rest)


def locate(path: str, *, key: str) -> tuple[Any, str]:
    """The pyarrow filesystem of a local path or URI and the path inside it. Raises InputError for an unknown scheme,
    or a filesystem that cannot be reached."""
    from pyarrow import fs

    if "://" not in path:
        return fs.LocalFileSystem(), os.path.expanduser(path)
    try:
        return fs.FileSystem.from_uri(path)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            key, got=f"{path} ({first_line(error)})", expected="a local path or a URI pyarrow can open"
        ) from error


def file_size(path: str, *, key: str) -> int:
    """Bytes of one file. Raises InputError if it is missing, unreadable, empty or a directory."""
    try:
        if "://" not in path:  # without pyarrow, so that `plan` stays fast
            found = os.stat(os.path.expanduser(path))
            is_folder, size = stat.S_ISDIR(found.st_mode), found.st_size
        else:
            filesystem, inner = locate(path, key=key)
            info = filesystem.get_file_info(inner)
            if info.type.name == "NotFound":
                raise FileNotFoundError(path)
            is_folder, size = info.type.name == "Directory", int(info.size or 0)
    except FileNotFoundError as error:
        where = "" if "://" in path or os.path.isabs(path) else f" (from {os.getcwd()})"
        raise InputError(key, got=f"no file at {path}{where}", expected="an existing file") from error
    except OSError as error:
        raise unreadable(path, error, key=key) from error
    if is_folder:
        remedy = "give a list of files to read several"
        raise InputError(key, got=f"a directory at {path}", expected="a file", remedy=remedy)
    if not size:
        raise InputError(key, got=f"an empty file at {path}", expected="a file with data in it")
    return size


def matching(path: str, *, key: str) -> list[str]:
    """The path itself, or those that a pattern stands for (`data/*.csv`), sorted by name; of a URI the last part may
    be one. Raises InputError if nothing matches."""
    if "://" in path:
        place, name = split(path)
        is_pattern = "*" in name
        names = [entry.name for entry in open_store(place).entries("")] if is_pattern else []
        found = [join(place, one) for one in fnmatch.filter(names, name)]
    else:
        local = os.path.expanduser(path)
        is_pattern = glob.has_magic(local) and not os.path.exists(local)
        found = glob.glob(local, recursive=True) if is_pattern else []
    if is_pattern and not found:
        raise InputError(key, got=f"{path}, which no file matches", expected="the files of a pattern")
    return sorted(found) if is_pattern else [path]


def read_bytes(path: str, *, key: str, limit: int | None = None, unpack: bool = False) -> bytes:
    """The raw bytes of one file, or its first `limit` bytes; `unpack`: those inside a .gz."""
    file_size(path, key=key)
    try:
        if "://" not in path and not unpack:
            with open(os.path.expanduser(path), "rb") as file:
                return file.read(limit)
        filesystem, inner = locate(path, key=key)
        stream = opened_stream(filesystem, inner) if unpack else filesystem.open_input_stream(inner, compression=None)
        with stream:
            return stream.read(limit)
    except OSError as error:
        raise unreadable(path, error, key=key) from error


def opened_stream(filesystem: Any, path: str) -> Any:
    """What is inside a packed file, or the file itself. Arrow knows suffixes in small letters only."""
    return filesystem.open_input_stream(path, compression="gzip" if path.lower().endswith(".gz") else "detect")


def unreadable(path: str, error: BaseException, *, key: str) -> InputError:
    """The error for a file that exists but cannot be read."""
    kind = "no permission to read" if isinstance(error, PermissionError) else "cannot read"
    return InputError(key, got=f"{kind} {path}: {first_line(error)}", expected="a readable file")


@contextlib.contextmanager
def whole_file(path: str, advice: WriteAdvice = SAVES) -> Iterator[BinaryIO]:
    """Open a new file, local or at a URI, that is written piece by piece: it has its name once the block ends, and is
    deleted if the block raises. Raises RunError: it cannot be written."""
    folder, name = split(path)
    store = open_store(folder, advice)
    if isinstance(store, LocalStore):
        with store.whole_file(name, buffering=0) as file:
            yield file
        return
    try:
        with store.open_write(name) as file:
            yield file
    except BaseException:
        store.delete(name)
        raise
