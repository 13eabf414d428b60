"""Bundles: a folder of a model, stored samples and ``about.json``, which may be signed.

``about.json`` lists every file's size and SHA-256. Its signature, Ed25519 over its bytes, is
checked before anything is parsed. No torch is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.world import ArgumentError, RondeError
from ronde.world.paths import file_digest, need
from ronde.world.whole_file import sync, whole_folder

__all__ = ["Bundle", "ShipError", "make_key", "verify_bundle", "write_bundle"]

FORMAT = 1
ABOUT, SIGNATURE = "about.json", "about.sig"
_MOST_ABOUT_BYTES = 1 << 20  # read before anything is checked; real ones have some kilobytes


class ShipError(RondeError):
    """An export is wrong, or a bundle is not what was signed."""


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files are whole.

    Attributes:
        path: its folder.
        about: what ``about.json`` says.
        signed: whether its signature was checked.
    """

    path: Path
    about: Mapping[str, Any]
    signed: bool

    @property
    def serial(self) -> int:
        """Grows with every bundle of one product; an older one is not installed."""
        return int(self.about["serial"])


def make_key(private: Path, public: Path) -> None:
    """Write a new pair of Ed25519 keys, as PEM; the private one is for its owner only.

    Raises:
        ArgumentError: one of them is there already.
    """
    need("cryptography", "ship", "signing a bundle")
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if private.absolute() == public.absolute():
        raise ArgumentError("the private and the public key need files of their own.")
    for file in (private, public):
        if not file.absolute().parent.is_dir():
            raise ArgumentError(f"{file}: there is no folder {file.absolute().parent}.")
        if file.exists():
            raise ArgumentError(f"{file} is there already: keys are never written over.")
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    with open(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(secret)
    pem = s.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, pem))


def write_bundle(
    path: Path,
    fill: Callable[[Path], None],
    about: Mapping[str, Any],
    *,
    key: Path | None = None,
    serial: int = 1,
) -> Bundle:
    """Write a bundle beside its place and rename it, so readers see all of it or nothing.

    Args:
        path: of the folder; it must not be there.
        fill: writes the files into the folder that it is given.
        about: what else ``about.json`` says.
        key: private key that signs it.
        serial: of the bundle.

    Raises:
        ArgumentError: the folder is there, or the key cannot be used.
        ShipError: from ``fill``.
    """
    if path.exists():
        raise ArgumentError(f"{path} is there already: give --out another name.")
    sign = _signer(key) if key else None
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(path) as folder:
        fill(folder)
        files = {
            f.name: {"bytes": f.stat().st_size, "sha256": file_digest(f)}
            for f in sorted(folder.iterdir())
        }
        values = {**about, "format": FORMAT, "serial": serial, "files": files}
        text = json.dumps(values, sort_keys=True, indent=1).encode()
        (folder / ABOUT).write_bytes(text)
        if sign:
            (folder / SIGNATURE).write_bytes(sign(text))
        for file in folder.iterdir():
            sync(file)
    return Bundle(path, json.loads(text), sign is not None)


def _signer(key: Path) -> Callable[[bytes], bytes]:
    need("cryptography", "ship", "signing a bundle")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ArgumentError(f"--sign {key} cannot be read as a private key: {error}") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise ArgumentError(f"--sign {key} is no Ed25519 key: ronde ship key makes one.")
    return private.sign


def _check_signature(path: Path, text: bytes, key: Path) -> None:
    need("cryptography", "ship", "checking a signature")
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public = load_pem_public_key(key.read_bytes())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--key {key} cannot be read as a public key: {error}") from None
    if not isinstance(public, Ed25519PublicKey):
        raise ArgumentError(f"--key {key} is no Ed25519 key.")
    if not (path / SIGNATURE).is_file():
        raise ShipError(f"{path} is not signed.")
    with (path / SIGNATURE).open("rb") as file:
        signature = file.read(65)  # one more than it has
    try:
        public.verify(signature, text)
    except InvalidSignature:
        raise ShipError(
            f"{path / ABOUT} was changed after signing, or {key} is of others."
        ) from None


def verify_bundle(path: Path, key: Path | None = None) -> Bundle:
    """Check a bundle's signature, then every file's size and digest.

    Args:
        path: of the folder.
        key: public key; without it, the bundle may be anybody's.

    Raises:
        ShipError: something was changed, is missing, or is not the bundle's.
    """
    if not (path / ABOUT).is_file():
        raise ShipError(f"{path} is no bundle: it has no {ABOUT}.")
    for entry in path.iterdir():
        if entry.is_symlink():
            raise ShipError(f"{entry} is a link: a bundle has none.")
        if not entry.is_file():
            raise ShipError(f"{entry} is no file: a bundle has nothing else.")
    with (path / ABOUT).open("rb") as file:
        text = file.read(_MOST_ABOUT_BYTES + 1)
    if key is not None:
        _check_signature(path, text, key)
    about: Any = None
    # whoever made the file decides how deep it nests
    with contextlib.suppress(ValueError, RecursionError):
        about = json.loads(text) if len(text) <= _MOST_ABOUT_BYTES else None
    files = about.get("files") if isinstance(about, dict) else None
    sound = isinstance(files, dict) and all(isinstance(f, dict) for f in files.values())
    if not isinstance(files, dict) or not sound or not isinstance(about.get("serial"), int):
        raise ShipError(f"{path / ABOUT} is damaged.")
    if about.get("format") != FORMAT:
        raise ShipError(f"{path} is of format {about.get('format')!r}; this Ronde reads {FORMAT}.")
    there = {f.name for f in path.iterdir()} - {ABOUT, SIGNATURE}
    for name in sorted(there - files.keys()):
        raise ShipError(f"{path / name} is not the bundle's.")
    for name, facts in files.items():
        file = path / name
        if Path(name).name != name or name not in there:
            raise ShipError(f"{path}: the file {name!r} is missing or outside the bundle.")
        if file.stat().st_size != facts.get("bytes") or file_digest(file) != facts.get("sha256"):
            raise ShipError(f"{file} was changed after the bundle was made.")
    return Bundle(path, about, key is not None)
