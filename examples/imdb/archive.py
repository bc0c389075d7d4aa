"""The published reviews: found in a folder, in the archive or at a URL; downloaded, checked and extracted once.

The archive is aclImdb_v1.tar.gz of Maas et al. (2011): 50,000 labelled reviews in train/ and test/, each with the folders
pos and neg.
"""

import hashlib
import http.client
import re
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from pathlib import Path

from tqdm import tqdm

PUBLISHED_MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
PARTS = [(part, side) for part in ("train", "test") for side in ("neg", "pos")]
NO_NETWORK = "Without --data the script trains on synthetic reviews, which need no network."


def find_folder(data: str, digest: str, cache: Path) -> Path:
    """Return the folder with the reviews that a path or a URL names; what had to be downloaded or extracted is in `cache`."""
    is_url = data.startswith(("http://", "https://"))
    if not is_url and Path(data).is_dir():
        return reviews_in(Path(data), data)
    if not is_url and not Path(data).is_file():
        raise FileNotFoundError(
            f"--data {data}: there is no such file or folder. Give the path or the URL of aclImdb_v1.tar.gz, "
            f"the folder that was extracted from it, or hub. {NO_NETWORK}"
        )
    digest = digest.lower()
    kind = kind_of(digest)
    extracted = cache / f"aclImdb-{digest}"
    path = cache / f"{digest[:8]}-{data.rstrip('/').rpartition('/')[2]}" if is_url else Path(data)
    if is_url and not extracted.exists() and not path.exists():
        download(data, path)
    if path.exists():
        check_digest(path, kind, digest, is_ours=is_url)
    if not extracted.exists():
        extract(path, extracted)
    return extracted


def reviews_in(folder: Path, given: object) -> Path:
    """Return the folder that has train/ and test/: this one, or aclImdb in it."""
    for each in (folder, folder / "aclImdb"):
        if all((each / part / side).is_dir() for part, side in PARTS):
            return each
    raise FileNotFoundError(
        f"--data {given}: there are no train/pos, train/neg, test/pos and test/neg. "
        "Give aclImdb_v1.tar.gz as it was published, or its folder aclImdb."
    )


def read_folder(folder: Path) -> list[tuple[str, int]]:
    """Return pairs of a text and its label: 1 for a good review, 0 for a bad one."""
    paths = [(path, side) for part, side in PARTS for path in sorted((folder / part / side).glob("*.txt"))]
    return [(path.read_text(encoding="utf-8"), int(side == "pos")) for path, side in paths]


def download(url: str, path: Path) -> None:
    """Download a file. What arrives is kept in a .part file, which the next start continues if this one is cut short."""
    part = path.with_name(f"{path.name}.part")
    had = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={had}-"} if had else {})
    total = None
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            if not reply.headers.get("Content-Range", "").startswith(f"bytes {had}-"):
                had = 0  # the server sends the whole file, whatever it was asked for
            if reply.headers["Content-Length"]:
                total = had + int(reply.headers["Content-Length"])
            bar = tqdm(desc=path.name, initial=had, total=total, unit="B", unit_scale=True)
            with part.open("ab" if had else "wb") as file, bar:
                while block := reply.read(1 << 16):
                    file.write(block)
                    bar.update(len(block))
        if total is not None and part.stat().st_size < total:
            raise ConnectionError("the server closed the connection")
    except urllib.error.HTTPError as error:
        if not (error.code == 416 and had):  # 416: nothing is left to send
            raise ConnectionError(
                f"{url}: the server answered {error.code} ({error.reason}). Check the address."
            ) from error
    except (OSError, http.client.HTTPException) as error:
        have = part.stat().st_size if part.exists() else 0
        if have == 0:
            raise ConnectionError(f"{url} cannot be reached: {error}. {NO_NETWORK}") from error
        of = f" of {total:,}" if total else ""
        raise ConnectionError(
            f"the download of {url} was cut short ({error}): {part} has {have:,}{of} bytes. "
            "The same command continues from there, or begins again if the server cannot send a part of a file."
        ) from error
    part.rename(path)


def kind_of(digest: str) -> str:
    """Return which digest it is: MD5s have 32 hexadecimal digits, SHA-256s have 64."""
    for kind, digits in (("md5", 32), ("sha256", 64)):
        if re.fullmatch(f"[0-9a-f]{{{digits}}}", digest):
            return kind
    raise ValueError(f"--digest {digest} is neither an MD5 (32 hexadecimal digits) nor a SHA-256 (64)")


def check_digest(path: Path, kind: str, digest: str, is_ours: bool) -> None:
    """Compare a file with its digest. One that we have downloaded is moved aside if it differs."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, kind).hexdigest()
    if found == digest:
        return
    text = f"{path} is not the file that was expected: its {kind.upper()} is {found} and should be {digest}."
    if is_ours:
        aside = path.with_name(f"{path.name}.wrong")
        path.replace(aside)
        text += f" It is kept as {aside.name}; the same command downloads it again."
    else:
        text += " It may be incomplete: download it again."
    raise ValueError(f"{text} If you mean this very file, pass --digest {found}.")


def extract(path: Path, folder: Path) -> None:
    """Extract the labelled reviews of an archive into a folder, which appears once it is complete."""

    def labelled(member: tarfile.TarInfo, destination: str) -> tarfile.TarInfo | None:
        safe = tarfile.data_filter(member, destination)  # raises for whatever would be written elsewhere
        return safe if re.fullmatch(r"(\./)?aclImdb/(train|test)/(pos|neg)/[^/]+\.txt", member.name) else None

    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        try:
            with tarfile.open(path) as archive:
                archive.extractall(place, filter=labelled)
        except tarfile.FilterError as error:
            raise ValueError(f"{path} is not safe to extract, and nothing of it was kept: {error}") from error
        except (tarfile.ReadError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is not a whole tar archive, and nothing of it was kept: {error}") from error
        reviews_in(Path(place), path).rename(folder)
