"""The published reviews of examples/imdb: from an archive, a folder or a server that may cut the connection."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "imdb"))

import archive

SIDES = ("train/pos", "train/neg", "test/pos", "test/neg")


def pack(*more: tarfile.TarInfo, padding: int = 0) -> tuple[bytes, str]:
    """Return an archive as the published one, with three reviews a folder, and its MD5."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz", compresslevel=0) as packed:
        names = [f"aclImdb/{side}/{index}_7.txt" for side in (*SIDES, "train/unsup") for index in range(3)]
        for name in ("aclImdb/README", *names):
            text = f"{name}: “très bien”<br />".encode() + b" " * padding
            member = tarfile.TarInfo(name)
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text))
        for member in more:
            packed.addfile(member)
    return target.getvalue(), hashlib.md5(target.getvalue()).hexdigest()


def found_in(folder: Path) -> Counter[int]:
    found = archive.read_folder(folder)
    assert all("“très bien”<br />" in text and f"/{('neg', 'pos')[label]}/" in text for text, label in found)
    return Counter(label for _, label in found)


def test_an_archive_is_extracted_once(tmp_path: Path) -> None:
    data, digest = pack()
    Path("aclImdb_v1.tar.gz").write_bytes(data)
    folder = archive.find_folder("aclImdb_v1.tar.gz", digest.upper(), tmp_path)
    assert found_in(folder) == {0: 6, 1: 6}
    assert {path.name for path in tmp_path.iterdir()} == {"aclImdb_v1.tar.gz", folder.name}
    assert not (folder / "train/unsup").exists()
    with mock.patch.object(archive, "extract", side_effect=AssertionError("extracted again")):
        assert archive.find_folder("aclImdb_v1.tar.gz", digest, tmp_path) == folder
        assert archive.find_folder("aclImdb_v1.tar.gz", digest, tmp_path) == folder
    (tmp_path / "elsewhere").mkdir()
    folder.rename(tmp_path / "elsewhere/aclImdb")
    for given in ("elsewhere", "elsewhere/aclImdb"):  # an extracted folder needs no digest
        assert found_in(archive.find_folder(given, archive.PUBLISHED_MD5, tmp_path)) == {0: 6, 1: 6}


def test_what_is_wrong_with_a_path_is_said(tmp_path: Path) -> None:
    data, digest = pack()
    Path("aclImdb_v1.tar.gz").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    with pytest.raises(
        FileNotFoundError, match=r"--data gone: there is no such file or folder.*Without --data.*no network"
    ):
        archive.find_folder("gone", digest, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"--data \.: there are no train/pos, .*its folder aclImdb"):
        archive.find_folder(".", digest, tmp_path)
    with pytest.raises(
        ValueError, match=f"its MD5 is {digest} and should be {archive.PUBLISHED_MD5}.*download it again"
    ):
        archive.find_folder("aclImdb_v1.tar.gz", archive.PUBLISHED_MD5, tmp_path)
    with pytest.raises(ValueError, match=f"its SHA256 is {sha256} and should be 0000.*pass --digest {sha256}"):
        archive.find_folder("aclImdb_v1.tar.gz", "0" * 64, tmp_path)
    with pytest.raises(ValueError, match="--digest 12 is neither an MD5"):
        archive.find_folder("aclImdb_v1.tar.gz", "12", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["aclImdb_v1.tar.gz"]  # a user's file stays where it is
    assert found_in(archive.find_folder("aclImdb_v1.tar.gz", sha256, tmp_path)) == {0: 6, 1: 6}


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


@pytest.mark.parametrize("member", [
    tarfile.TarInfo("../outside.txt"),
    tarfile.TarInfo("aclImdb/train/pos/../../../../outside.txt"),
    link("aclImdb/train/pos/9_9.txt", "/etc/passwd"),
    link("aclImdb/test/neg", "../../.."),
], ids=lambda member: member.name)  # fmt: skip
def test_nothing_is_extracted_outside(tmp_path: Path, member: tarfile.TarInfo) -> None:
    data, digest = pack(member)
    cache = tmp_path / "in/here"
    cache.mkdir(parents=True)
    Path("bad.tar.gz").write_bytes(data)
    with pytest.raises(ValueError, match=r"bad\.tar\.gz is not safe to extract, and nothing of it was kept"):
        archive.find_folder("bad.tar.gz", digest, cache)
    assert list(cache.iterdir()) == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bad.tar.gz", "here", "in"]


class Server(ThreadingHTTPServer):
    """Serves one file, and closes the connection after so many bytes of it."""

    def __init__(self, data: bytes, *, knows_ranges: bool = True) -> None:
        self.data, self.knows_ranges = data, knows_ranges
        self.cut_after = len(data)
        self.asked: list[str | None] = []
        """The ranges of the requests."""
        super().__init__(("127.0.0.1", 0), Reply)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/data/aclImdb_v1.tar.gz"


class Reply(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.asked.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.knows_ranges else 0
        size = len(self.server.data)
        if start >= size:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - start))
        self.end_headers()
        self.wfile.write(self.server.data[start : start + self.server.cut_after])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def start(*args: Any, **settings: Any) -> Server:
        servers.append(Server(*args, **settings))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_download_that_was_cut_is_continued(tmp_path: Path, serve: Any, knows_ranges: bool) -> None:
    data, digest = pack(padding=20_000)
    server = serve(data, knows_ranges=knows_ranges)
    server.cut_after = 200_000
    with pytest.raises(ConnectionError, match=rf"was cut short .*part has 200,000 of {len(data):,} bytes.*same"):
        archive.find_folder(server.url, digest, tmp_path)
    server.cut_after = len(data)
    folder = archive.find_folder(server.url, digest, tmp_path)
    assert server.asked == [None, "bytes=200000-"]
    assert found_in(folder) == {0: 6, 1: 6}
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, f"{digest[:8]}-aclImdb_v1.tar.gz"}
    server.shutdown()  # files that exist need no network
    assert archive.find_folder(server.url, digest, tmp_path) == folder
    assert len(server.asked) == 2
