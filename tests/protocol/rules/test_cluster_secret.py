"""The secret of a cluster: its file, the keys that are made of it."""

from __future__ import annotations

import pytest

from baton.protocol.rules.cluster_secret import SECRET_BYTES, ClusterSecret, Secrets, hkdf

SECRET = ClusterSecret.make(bytes(range(SECRET_BYTES)))


def test_hkdf_is_that_of_rfc_5869():
    """Its first test case."""
    made = hkdf(bytes([11] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert made.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_a_file_is_read_as_it_was_written():
    assert ClusterSecret.parse(SECRET.file()) == SECRET
    assert ClusterSecret.parse(f"\n  {SECRET.text.upper()}\r\n") == SECRET
    assert SECRET.file().startswith("# The secret of a cluster")
    assert SECRET.text not in repr(SECRET)
    assert Secrets.load(Secrets((SECRET, SECRET)).dump()) == Secrets((SECRET, SECRET))
    assert not Secrets.load("")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "# nothing\n",
        SECRET.text[:-1],
        SECRET.text + "a",
        SECRET.text[7:],
        SECRET.text * 2,
        "baton1-???",
        f"{SECRET.text}\n{SECRET.text}\n",
    ],
)
def test_what_is_no_secret_is_refused_and_not_shown(content: str):
    with pytest.raises(ValueError) as error:
        ClusterSecret.parse(content)
    assert SECRET.text[10:20] not in str(error.value)


def test_each_purpose_has_a_key_of_its_own():
    other = ClusterSecret.make(bytes(SECRET_BYTES))
    keys = [
        SECRET.key("a"),
        SECRET.key("b"),
        SECRET.key("a", "b"),
        SECRET.key("ab"),
        SECRET.key("a", "b", ""),
    ]
    keys += [other.key("a"), SECRET.key("a", length=33)]
    assert len(set(keys)) == len(keys)
    assert SECRET.key("a") == ClusterSecret.parse(SECRET.file()).key("a")
    assert SECRET.id != other.id
    assert len(SECRET.key("a", length=100)) == 100
