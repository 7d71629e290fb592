"""Links between workers: what is sent arrives, and with a certificate nobody else gets in."""

import errno
import logging
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from certificates import issued_certificates, made_certificate

from thinwire.collectives import links
from thinwire.collectives.certificates import Certificate
from thinwire.collectives.links import Link, Words, dial, serve


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[Certificate]:
    folder = tmp_path_factory.mktemp("certificates")
    return [Certificate(made_certificate(folder / f"{each}.pem")) for each in range(2)]


NAMED = bytes(17)  # what a link's first connection begins with


class Owner:
    """Keeps what arrives, and answers `hello`. `ended`: a link has, and `silent`, in silence."""

    limit = 1 << 24
    link: Link | None = None

    def __init__(self) -> None:
        self.found, self.ended, self.closed = dict[str, bytes](), threading.Event(), False
        self.silent = False

    def status(self) -> Words:
        return {"kind": "nothing"}

    def take(self, link: Link, words: Words, body: bytes) -> None:
        self.found[str(words["kind"])], self.link = body, link
        if words["kind"] == "hello":
            link.send({"kind": "answer"}, bytes(range(256)) * 4096)
            for each in range(100):
                link.send({"kind": f"{each}"}, b"x" * each)

    def lost(self, link: Link, *, silent: bool) -> None:
        self.silent = silent
        self.ended.set()

    def call(self, address: tuple[str, int], certificate: Certificate | None) -> None:
        dial(self, address, lambda: ({"kind": "hello"}, b""), lambda: None if self.closed else True, certificate)

    def has(self, kind: str, seconds: float = 10.0) -> bool:
        ends = time.monotonic() + seconds
        while kind not in self.found and time.monotonic() < ends:
            time.sleep(0.01)
        return kind in self.found


@pytest.mark.parametrize("which", [None, 0])
def test_what_is_sent_arrives(certificates: list[Certificate], which: int | None) -> None:
    here, there, certificate = Owner(), Owner(), None if which is None else certificates[which]
    there.call(serve(here, "127.0.0.1", certificate), certificate)
    assert there.has("99")
    there.closed = True
    assert there.found["answer"] == bytes(range(256)) * 4096
    assert all(there.found[f"{each}"] == b"x" * each for each in range(100))


@pytest.mark.parametrize("which", [None, 0])
def test_last_words_arrive_while_the_other_side_still_speaks(
    certificates: list[Certificate], which: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, certificate = Owner(), Owner(), None if which is None else certificates[which]
    answer, take, said, spoken = here.take, there.take, threading.Event(), threading.Event()

    def leaves(link: Link, words: Words, body: bytes) -> None:
        answer(link, words, body)
        link.close()
        said.set()

    def busy(link: Link, words: Words, body: bytes) -> None:
        there.link = link
        assert spoken.wait(60)
        take(link, words, body)

    monkeypatch.setattr(here, "take", leaves)
    monkeypatch.setattr(there, "take", busy)
    there.call(serve(here, "127.0.0.1", certificate), certificate)
    assert said.wait(60)
    there.closed = True
    for _ in range(50):  # some of it once the other side has closed
        if there.link is not None:
            there.link.send({"kind": "late"})
        time.sleep(0.01)
    spoken.set()
    assert there.has("99")
    assert there.ended.wait(60)
    assert "late" not in here.found


@pytest.mark.parametrize("which", [None, 1])
def test_a_stranger_is_refused(
    certificates: list[Certificate], which: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="thinwire")
    here, stranger = Owner(), Owner()
    address = serve(here, "127.0.0.1", certificates[0])
    stranger.call(address, None if which is None else certificates[which])
    with socket.create_connection(address) as raw:
        raw.sendall(NAMED + b"TWOS" + bytes(12))
        raw.settimeout(10.0)
        assert b"TWOS" not in b"".join(iter(lambda: _read(raw), b""))
    deadline = time.monotonic() + 10.0
    while "refused a connection from 127.0.0.1" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    stranger.closed = True
    assert caplog.text.count("refused a connection from 127.0.0.1") == 1
    assert not here.found
    assert not stranger.found


def test_strangers_who_say_nothing_keep_nobody_out(
    certificates: list[Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = iter([OSError(errno.EMFILE, "too many open files")])

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        for error in accept:
            raise error
        return accepted(listener)

    accepted = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", failing)
    for name, value in {"SILENCE": 0.5, "_ANSWERED": 2, "_TICK": 0.1}.items():
        monkeypatch.setattr(links, name, value)
    here, there = Owner(), Owner()
    address = serve(here, "127.0.0.1", certificates[0])
    silent = [socket.create_connection(address) for _ in range(5)]
    there.call(address, certificates[0])
    assert there.has("99", 60.0)
    there.closed = True
    for each in silent:
        each.close()


def test_both_sides_of_a_silent_link_know_that_the_other_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENCE", 0.5)
    monkeypatch.setattr(links, "CONNECTIONS", 1)
    here, there = Owner(), Owner()
    with socket.create_connection(serve(here, "127.0.0.1")) as mute:
        mute.sendall(NAMED)
        said = b"".join(iter(lambda: _read(mute), b""))
    assert here.ended.wait(60.0)
    assert here.silent
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there.call(listener.getsockname(), None)
        connection, _ = listener.accept()
        with connection:  # open until the other side has seen the end: it may still be about to say its name
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            assert there.ended.wait(60.0)
    there.closed = True
    assert there.silent


def test_who_takes_nothing_and_still_speaks_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENCE", 0.5)
    monkeypatch.setattr(links, "CONNECTIONS", 1)
    here, words = Owner(), b'{"kind": "nothing"}'
    with socket.create_connection(serve(here, "127.0.0.1")) as deaf, suppress(ConnectionError):
        deaf.sendall(NAMED + (frame := links._HEAD.pack(links._MAGIC, len(words), 0) + words))
        assert here.has("nothing", 60.0)
        assert here.link
        here.link.send({"kind": "share"}, bytes(1 << 26))
        while not here.ended.wait(0.05):
            deaf.sendall(frame)
    assert here.ended.wait(60.0)
    assert here.silent


def test_a_link_of_which_one_connection_ends_is_made_anew() -> None:
    here, there = Owner(), Owner()
    there.call(serve(here, "127.0.0.1"), None)
    assert there.has("99")
    assert here.link
    here.link._connections[-1].shutdown(socket.SHUT_RDWR)
    assert there.ended.wait(60.0)
    assert here.ended.wait(60.0)
    there.found.clear()
    assert there.has("99")
    there.closed = True
    assert not there.silent


def test_half_a_link_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(links, "SILENCE", 0.1)
    here = Owner()
    address = serve(here, "127.0.0.1")
    halves = [socket.create_connection(address) for _ in range(2)]
    for number, each in enumerate(halves):
        each.sendall(NAMED[:-1] + bytes([number]))
    assert all(b"".join(iter(partial(_read, each), b"")) == b"" for each in halves)
    for each in halves:
        each.close()
    assert here.link is None
    deadline = time.monotonic() + 10.0
    while "refused a connection" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "the other connections of a link have not come" in caplog.text


def test_connections_that_wait_for_others_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ANSWERED", 1)
    here, friend = Owner(), Owner()
    friend.call(serve(here, "127.0.0.1"), None)
    assert friend.has("99")
    friend.closed = True


def test_another_certificate_of_the_same_authority_is_refused(tmp_path: Path) -> None:
    files = issued_certificates(tmp_path, 2)
    ours, theirs = (Certificate(each) for each in files)
    here, stranger, friend = Owner(), Owner(), Owner()
    address = serve(here, "127.0.0.1", ours)
    stranger.call(address, theirs)
    friend.call(address, ours)
    assert friend.has("99")
    friend.closed = stranger.closed = True
    assert not stranger.found


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionError:
        return b""


def test_files_that_hold_no_certificate(tmp_path: Path) -> None:
    wrong: list[tuple[str, type[Exception], str]] = [
        ("absent", FileNotFoundError, "absent"),
        ("open", ValueError, "by other users"),
        ("text", ValueError, "PEM"),
    ]
    made_certificate(tmp_path / "open").chmod(0o644)
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    for name, error, words in wrong:
        with pytest.raises(error, match=words):
            Certificate(tmp_path / name)
