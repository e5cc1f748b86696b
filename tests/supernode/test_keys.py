"""The keys of several SuperNodes."""

import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from flower_blsgd.errors import UsageError
from flower_blsgd.supernode.keys import keys_of_nodes

from .servers import write_key


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [write_key(tmp_path / "node-1"), write_key(tmp_path / "node-2")]


def refusal(paths: list[Path], num_nodes: int) -> str:
    with pytest.raises(UsageError) as refused:
        keys_of_nodes(paths, num_nodes)
    line = str(refused.value)
    assert "\n" not in line
    assert "--auth-supernode-private-key" in line
    return line


def test_each_node_its_key_in_order(two: list[Path]) -> None:
    assert keys_of_nodes(two, 2) == two
    assert keys_of_nodes(two[::-1], 2) == two[::-1]
    assert keys_of_nodes([], 3) == [None, None, None]


def test_key_of_ssh_keygen(tmp_path: Path) -> None:
    path = tmp_path / "node"
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", path]
    subprocess.run(make, check=True)
    assert keys_of_nodes([path], 1) == [path]


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_one_key_per_node(two: list[Path], num_nodes: int) -> None:
    line = refusal(two, num_nodes)
    assert line.startswith("2 --auth-supernode-private-key for ")
    assert f" {num_nodes} SuperNode" in line


def test_same_key_twice(two: list[Path], tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    copied.write_bytes(two[0].read_bytes())
    assert f"{copied} is the key of {two[0]}" in refusal([two[0], copied], 2)


def test_key_that_is_none(two: list[Path], tmp_path: Path) -> None:
    assert "cannot be read" in refusal([tmp_path / "missing"], 1)
    assert "is no OpenSSH private key" in refusal([two[0].with_suffix(".pub")], 1)
    other = ed25519.Ed25519PrivateKey.generate()
    path = tmp_path / "edwards"
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    assert "is not on an elliptic curve; make one with ssh-keygen" in refusal([path], 1)


def test_key_with_a_password(tmp_path: Path) -> None:
    path = tmp_path / "locked"
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "secret", "-f", path]
    subprocess.run(make, check=True)
    assert "without a password" in refusal([path], 1)
