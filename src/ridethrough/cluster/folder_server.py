"""Serves one folder, read-only, to `ridethrough k8s collect`: python -m ridethrough.cluster.folder_server FOLDER

Runs in a small pod beside the volume and is reached through the API server's pod proxy, so nothing is opened to the
outside. Paths begin with the word in RIDETHROUGH_WORD, which only the caller that made the pod knows:

    GET /WORD/list?checkpoints=0          [{"path", "bytes"}]
    GET /WORD/hash?path=P                 {"xxh3_128"}
    GET /WORD/file?path=P&offset=N        the bytes from N on
"""

from __future__ import annotations

import hmac
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import xxhash

PORT = 8780
_PIECE = 1 << 20


def listing(folder: Path, *, checkpoints: bool) -> list[dict[str, str | int]]:
    """Files below `folder` in order of their paths; links are not followed."""
    out: list[dict[str, str | int]] = []
    for root, folders, files in os.walk(folder):
        if not checkpoints and Path(root) == folder:
            folders[:] = [name for name in folders if name != "checkpoints"]
        for name in files:
            path = Path(root) / name
            if path.is_file() and not path.is_symlink():
                out.append({"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size})
    return sorted(out, key=lambda entry: str(entry["path"]))


def file_hash(path: Path) -> str:
    """xxh3-128 of a file's content, hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


class FolderServer(ThreadingHTTPServer):
    """One thread per request; ends with the process."""

    daemon_threads = True

    def __init__(self, folder: Path, word: str, host: str = "0.0.0.0", port: int = PORT) -> None:
        super().__init__((host, port), _Handler)
        self.folder, self.word = folder.resolve(), word


class _Handler(BaseHTTPRequestHandler):
    server: FolderServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        word, _, verb = parts.path.lstrip("/").partition("/")
        if not hmac.compare_digest(word, self.server.word):
            return self._json(403, {"message": "wrong word"})
        if verb == "list":
            return self._json(200, listing(self.server.folder, checkpoints=query.get("checkpoints") == "1"))
        path = (self.server.folder / query.get("path", "")).resolve()
        if verb not in ("file", "hash") or not path.is_relative_to(self.server.folder) or not path.is_file():
            return self._json(404, {"message": f"no file {query.get('path')!r}"})
        if verb == "hash":
            return self._json(200, {"xxh3_128": file_hash(path)})
        return self._file(path, int(query.get("offset", "0")))

    def _file(self, path: Path, offset: int) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(offset)
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(max(0, size - offset)))
            self.end_headers()
            left = size - offset
            while left > 0 and (piece := file.read(min(_PIECE, left))):
                self.wfile.write(piece)
                left -= len(piece)

    def _json(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the path holds the word."""


def main(folder: str) -> None:
    FolderServer(Path(folder), os.environ["RIDETHROUGH_WORD"]).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
